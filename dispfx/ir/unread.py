"""Parts of a decoder that its logits do not depend on, such as the head of a second output.

They are not in the graph, so they are not pruned; they are counted, and written unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping

from dispfx.ir.sites import Refusal


def unread_parts(unread: Mapping[str, int], read: Iterable[str], outputs: int) -> tuple[Refusal, ...]:
    """Return the largest modules without any read parameter, with their sizes.

    Args:
        unread: size of each parameter that the logits do not depend on, by path.
        read: paths of the parameters that they depend on.
        outputs: how many tensors of the logits' shape the decoder returns.
    """
    in_use = {prefix for path in read for prefix in _prefixes(path)}
    sizes: dict[str, int] = {}
    for path, size in unread.items():
        part = next(prefix for prefix in (*_prefixes(path), path) if prefix not in in_use)
        sizes[part] = sizes.get(part, 0) + size
    of = f", the first of {outputs} outputs of that shape" if outputs > 1 else ""
    return tuple(
        Refusal(part, f"not read for the logits{of}; {size:,} parameters are kept as they are")
        for part, size in sizes.items()
    )


def _prefixes(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a parameter, the outermost first."""
    parts = path.split(".")
    for end in range(1, len(parts)):
        yield ".".join(parts[:end])
