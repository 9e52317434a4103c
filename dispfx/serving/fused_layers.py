"""What a linear layer of an engine reads, computes and writes, from the layout of the folder.

    the folder                  the engine
    norm: select, readers       the layer of the readers gathers its input
    module: read                the layer of the module gathers its input
    module: sizes               the product is smaller
    module: write               the product is put among zeros

1. An engine may fuse modules that the folder has apart, such as q, k and v.  The fused layer has one input,
   so its modules must read the same features.
2. Names decide nothing: the layout says which modules read a norm, and the engine which modules it fuses.
3. What an engine cannot compute is refused with the path of the module.
4. A module that no layer of the engine stands for is an error: it would be served at its full size.

Nothing here imports an engine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispfx.errors import OutputError
from dispfx.huggingface.entries import checked_section
from dispfx.huggingface.layout import READ, SELECT, WRITE, Layout, ModuleLayout

# The attributes in which linear layers of torch and transformers keep their sizes.
_INPUTS, _OUTPUTS = ("in_features", "nx"), ("out_features", "nf")

_OTHER_WAY = "load the folder with transformers after `import dispfx` (docs/huggingface.md)"
_WRITE_AGAIN = "write the folder again: dispfx apply MODEL DIR/plan.safetensors --out NEW"


@dataclass(frozen=True)
class Gather:
    """An index by which a layer gathers its input, or its product.

    Args:
        features: of the decoder; a product gets this many.
        kept: of them; an input gets this many.
        padded: whether the index may point one past the last feature of what is gathered, at a zero.
        sources: names of the stored indices, which must be equal.
        loaded: whether this layer loads the index; another one does where several layers read a norm.
    """

    features: int
    kept: int
    padded: bool
    sources: tuple[str, ...]
    loaded: bool = True


@dataclass(frozen=True)
class FusedLayer:
    """A linear layer of an engine.

    Args:
        paths: of the modules of the folder that it stands for, in order.
        inputs: features that the product takes, or None where they are the dense decoder's.
        outputs: features that the product gives for each module, or None likewise.
        read: how the input is gathered.
        write: how the product is gathered.
    """

    paths: tuple[str, ...]
    inputs: int | None
    outputs: tuple[int | None, ...]
    read: Gather | None
    write: Gather | None

    @staticmethod
    def as_dense(paths: Sequence[str]) -> "FusedLayer":
        """Return the layer that stands for modules that are not pruned."""
        return FusedLayer(tuple(paths), None, (None,) * len(paths), None, None)

    @property
    def path(self) -> str:
        """The first module, which errors name."""
        return self.paths[0]

    def output_sizes(self, dense: Sequence[int]) -> list[int]:
        """Return the sizes of the parts of the product.

        Args:
            dense: the sizes that the engine derived from the config.

        Raises:
            OutputError: if a module that is fused on disk cannot be divided into such parts.
        """
        if len(self.outputs) == len(dense):
            return [size if kept is None else kept for kept, size in zip(self.outputs, dense, strict=True)]
        # Fused on disk: the parts are equally wide, or the layout would not be smaller between modules.
        total = self.outputs[0]
        if len(self.outputs) == 1 and (total is None or total == sum(dense)):
            return list(dense)
        if len(self.outputs) == 1 and total is not None and len(set(dense)) == 1 and not total % len(dense):
            return [total // len(dense)] * len(dense)
        raise unserved(self.path, f"its {total} features cannot be divided like the dense {list(dense)}")


class ServedLayout:
    """The layout of a folder, by the layers of an engine.

    Args:
        layout: of the folder.

    Raises:
        OutputError: if it has a module that no linear layer can stand for, or a buffer that an engine would
            compute otherwise (rule 3).
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._norms = {reader: path for path, norm in layout.modules.items() for reader in norm.readers}
        self._served: set[str] = set()
        for path, module in layout.modules.items():
            _require_linear(path, module)
        for path in layout.buffers:
            raise unserved(
                path,
                "it stores this buffer, because the config gives other values, which vLLM takes",
                hint="open the decoder with from_pretrained(…, dtype=…) or --dtype, not .to(dtype), which "
                "rounds such buffers; then prune it again",
            )

    @staticmethod
    def of_section(section: Mapping[str, Any]) -> "ServedLayout":
        """Read the dispfx section of a config.

        Raises:
            OutputError: if the folder has another format, or cannot be served.
            PlanMismatchError: if its layout cannot be read.
        """
        checked_section(dict(section), None)
        if section.get("layout") is None:
            raise OutputError(
                f"this decoder is stored as a graph, which vLLM does not run: {section.get('reason')}",
                hint="open the folder with dispfx.load(folder)",
            )
        return ServedLayout(Layout.from_json(section["layout"]))

    @property
    def paths(self) -> set[str]:
        """Paths of the modules that differ from the dense decoder's, and of those that read a norm."""
        return set(self.layout.modules) | set(self._norms)

    def renamed(self) -> dict[str, str]:
        """Return new names of stored tensors: a norm's index goes to the first of its readers."""
        return {
            f"{path}.{SELECT}": f"{norm.readers[0]}.{READ}"
            for path, norm in self.layout.modules.items()
            if norm.readers
        }

    def fused(self, paths: Sequence[str]) -> FusedLayer | None:
        """Return the layer that stands for some modules, or None if they are as in the dense decoder.

        Raises:
            OutputError: if one layer cannot stand for all of them (rule 1).
        """
        if self.paths.isdisjoint(paths):
            return None
        modules = [self.layout.modules.get(path, ModuleLayout()) for path in paths]
        inputs = {_size(module, _INPUTS) for module in modules}
        read = self._read(paths, modules)
        if len(inputs) > 1 or (read is not None and inputs != {read.kept}):
            raise unserved(paths[0], f"it is fused with {', '.join(paths[1:])}, which read other features")
        outputs = tuple(_size(module, _OUTPUTS) for module in modules)
        self._served.update(paths)
        return FusedLayer(tuple(paths), inputs.pop(), outputs, read, _write(paths, modules))

    def require_all_served(self) -> None:
        """Pass if a layer stands for every module.

        Raises:
            OutputError: naming the first module that has none (rule 4).
        """
        norms = {path for path, norm in self.layout.modules.items() if norm.readers}
        for path in sorted((self.paths - norms) - self._served):
            raise unserved(
                path,
                "its class in vLLM does not say which layer stands for this module",
                hint="serve with --model-impl transformers, which takes the modules of the decoder itself",
            )

    def require_untouched(self, path: str, kind: str) -> None:
        """Pass if nothing at or below a path is pruned.

        Args:
            kind: of the layer there, for the error.

        Raises:
            OutputError: naming the module.
        """
        for pruned in sorted(self.paths):
            if f"{pruned}.".startswith(f"{path}."):
                raise unserved(pruned, f"{kind} is served only where it is not pruned")

    def _read(self, paths: Sequence[str], modules: Sequence[ModuleLayout]) -> Gather | None:
        norms = {self._norms.get(path) for path in paths}
        own = {(module.read, module.padded) for module in modules}
        if len(norms) > 1 or len(own) > 1 or (norms != {None} and own != {(None, False)}):
            raise unserved(paths[0], f"it is fused with {', '.join(paths[1:])}, which read other features")
        if (norm := norms.pop()) is not None:
            layout = self.layout.modules[norm]
            assert layout.select is not None
            return Gather(*layout.select, False, (f"{norm}.{SELECT}",), layout.readers[0] in paths)
        read, padded = own.pop()
        return None if read is None else Gather(*read, padded, tuple(f"{path}.{READ}" for path in paths))


def shared(size: int, ranks: int, path: str) -> int:
    """Return the features of one rank.

    Raises:
        OutputError: if they cannot be shared evenly.
    """
    if size % ranks:
        raise OutputError(
            f"{size} features cannot be shared evenly by {ranks} ranks",
            where=path,
            hint=f"serve with another --tensor-parallel-size, or compile with --align {ranks}",
        )
    return size // ranks


def unserved(path: str, reason: str, hint: str = _OTHER_WAY) -> OutputError:
    """Return the error for a module that vLLM cannot run as it was pruned."""
    return OutputError(f"vLLM cannot serve this folder: {reason}", where=path, hint=hint)


def _require_linear(path: str, module: ModuleLayout) -> None:
    if module.select is not None and not module.readers:
        raise OutputError(
            "the folder does not say which modules read this norm: an older dispfx wrote it",
            where=path,
            hint=_WRITE_AGAIN,
        )
    if module.shapes and not any(name in module.sizes for name in (*_INPUTS, *_OUTPUTS)):
        raise unserved(
            path,
            "it has a pruned module that is not a linear layer (experts, a router, an embedding or a norm)",
        )


def _size(module: ModuleLayout, names: Iterable[str]) -> int | None:
    return next((module.sizes[name] for name in names if name in module.sizes), None)


def _write(paths: Sequence[str], modules: Sequence[ModuleLayout]) -> Gather | None:
    writes = [(path, module.write) for path, module in zip(paths, modules, strict=True) if module.write]
    if not writes:
        return None
    if len(paths) > 1:
        raise unserved(writes[0][0], f"it is fused in {', '.join(paths)} and puts its features among zeros")
    path, (features, kept) = writes[0]
    return Gather(features, kept, True, (f"{path}.{WRITE}",))
