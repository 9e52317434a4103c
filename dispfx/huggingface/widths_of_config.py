"""Find the config of an ordinary decoder that has given shapes.

    dense config, dense shapes → wanted shapes     ⇒     {hidden_size: 416, intermediate_size: 1024}

No architecture is known here.  The whole numbers of the config that equal a size that changes are tried,
and a number counts as found when the decoder that is built with it, without memory, comes closer to the
wanted shapes; so do numbers that a config leaves open.  Where key/value heads are removed, every number that
they divide is tried with the same share.  `head_dim` is the one name that is known: a head keeps its size,
and decoders that let it be given, and would otherwise derive it from the width of the stream, get it as it
was.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from dispfx.analysis.label_map import Mismatch
from dispfx.errors import first_line

Shapes = Mapping[str, tuple[int, ...]]
Build = Callable[[PreTrainedConfig], Any]
# The config that holds a number, as attributes from the outermost, and its name there.
_Place = tuple[str, ...]
_HEAD_DIM = "head_dim"
_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Resized:
    """A config that gives the wanted shapes.

    Args:
        config: a copy of the dense decoder's, with other numbers.
        numbers: those that differ, by name.
    """

    config: PreTrainedConfig
    numbers: Mapping[str, int]


def resized(
    config: PreTrainedConfig,
    dense: Shapes,
    wanted: Shapes,
    build: Build = AutoModelForCausalLM.from_config,
    heads: Collection[tuple[int, int]] = (),
) -> Resized | Mismatch:
    """Return a config whose decoder has the wanted shapes, or the reason why there is no such config.

    Args:
        config: of the dense decoder; it is not changed.
        dense: shape of every parameter, and buffer, of the dense decoder by path.
        wanted: of the smaller one, for the same paths.
        build: makes a decoder from a config.
        heads: number of key/value heads of an attention, and how many of them it keeps.
    """
    sizes = {
        (old, new)
        for path, shape in wanted.items()
        for old, new in zip(dense[path], shape, strict=True)
        if old != new
    }
    choices = dict(_choices(config, sizes, {pair for pair in heads if pair[0] != pair[1]}))
    starts = [
        {},
        {place: values[0] for place, values in choices.items() if number_of(config, place) is not None},
    ]
    tries = [_descend(partial(_try, config, wanted, build), start, choices) for start in starts]
    best = min(tries, key=lambda found: found.wrong)
    if best.wrong:
        return Mismatch(best.reason)
    numbers = {".".join(place): value for place, value in best.numbers.items()}
    changed = _with_numbers(config, best.numbers)
    try:
        # Transformers checks a config when it is written and read, not when a number changes.
        changed.validate()  # type: ignore[attr-defined]
    except Exception as error:  # It wraps what a class's own check raises.
        return Mismatch(f"transformers does not load it: {first_line(error.__cause__ or error)}")
    return Resized(changed, numbers)


@dataclass(frozen=True, eq=False)
class _Try:
    numbers: dict[_Place, int]
    wrong: int
    reason: str


def _descend(
    attempt: Callable[[dict[_Place, int]], _Try],
    start: dict[_Place, int],
    choices: Mapping[_Place, list[int]],
) -> _Try:
    """Change one number at a time for as long as fewer shapes are wrong."""
    best = attempt(start)
    for _ in range(_ROUNDS):
        if not best.wrong:
            break
        closer = min(
            (attempt(numbers) for numbers in _neighbours(best.numbers, choices)),
            key=lambda found: found.wrong,
            default=best,
        )
        if closer.wrong >= best.wrong:
            break
        best = closer
    return best


def _neighbours(
    numbers: Mapping[_Place, int], choices: Mapping[_Place, list[int]]
) -> Iterator[dict[_Place, int]]:
    for place, values in choices.items():
        if place in numbers:
            yield {other: value for other, value in numbers.items() if other != place}
        yield from ({**numbers, place: value} for value in values if numbers.get(place) != value)


def _try(config: PreTrainedConfig, wanted: Shapes, build: Build, numbers: dict[_Place, int]) -> _Try:
    changes = ", ".join(f"{'.'.join(place)}={value}" for place, value in numbers.items()) or "its own numbers"
    try:
        with no_init_weights(), torch.device("meta"):
            model = build(_with_numbers(config, numbers))
    except Exception as error:
        # The decoder's own code, given numbers that it may not like.
        return _Try(numbers, len(wanted) + 1, f"with {changes} it cannot be built: {first_line(error)}")
    found = {path: tuple(tensor.shape) for path, tensor in model.named_parameters()}
    found |= {path: tuple(tensor.shape) for path, tensor in model.named_buffers()}
    wrong = [path for path, shape in wanted.items() if found.get(path) != shape]
    reason = ""
    if wrong:
        path = wrong[0]
        reason = f"{path} would have to be {wanted[path]}, and with {changes} it is {found.get(path)}"
    return _Try(numbers, len(wrong), reason)


def with_fewer_heads(config: PreTrainedConfig, kept: int) -> PreTrainedConfig:
    """Return a config that names the number of key/value heads that all layers keep, and of query heads.

    It is the same config if it names neither, or transformers rejects the new numbers.
    """
    queries, shared = (number_of(config, (name,)) for name in ("num_attention_heads", "num_key_value_heads"))
    dense = shared or queries
    if not queries or not dense or kept >= dense or queries % dense:
        return config
    numbers = {("num_attention_heads",): queries // dense * kept}
    if shared:
        numbers[("num_key_value_heads",)] = kept
    width = number_of(config, ("hidden_size",))
    if number_of(config, (_HEAD_DIM,)) is None and width is not None:
        numbers[(_HEAD_DIM,)] = width // queries
    changed = _with_numbers(config, numbers)
    try:
        changed.validate()  # type: ignore[attr-defined]
    except Exception:  # It wraps what a class's own check raises.
        return config
    return changed


def _choices(
    config: PreTrainedConfig, sizes: set[tuple[int, int]], shares: set[tuple[int, int]]
) -> Iterator[tuple[_Place, list[int]]]:
    """Yield every number of the config that may have to change, with the values that it may get."""
    for place, value in _numbers(config):
        new = {new for old, new in sizes if value in (old, None)}
        if value and place[-1] != _HEAD_DIM:  # Queries are a multiple of key/value heads.
            new |= {value // old * kept for old, kept in shares if value % old == 0}
        if new:
            yield place, sorted(new)
    heads, width = (number_of(config, (name,)) for name in ("num_attention_heads", "hidden_size"))
    if heads is not None and width is not None and not _has(config, _HEAD_DIM):
        yield (_HEAD_DIM,), [width // heads]


def _numbers(config: PreTrainedConfig, outer: _Place = ()) -> Iterator[tuple[_Place, int | None]]:
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _numbers(value, (*outer, name))
        elif not name.startswith("_") and (value is None or type(value) is int):
            yield (*outer, name), value


def number_of(config: Any, place: _Place) -> int | None:
    """Return a whole number of a config; None where it holds none, or refuses one that differs by layer."""
    held: Any = config
    for name in place:
        held = getattr(held, name) if _has(held, name) else None
    return held if type(held) is int else None


def _has(config: Any, name: str) -> bool:
    """Whether a config has an attribute, and gives it."""
    try:
        return hasattr(config, name)
    except RuntimeError:
        return False


def _with_numbers(config: PreTrainedConfig, numbers: Mapping[_Place, int]) -> PreTrainedConfig:
    twin = copy.deepcopy(config)
    for place, value in numbers.items():
        held: Any = twin
        for name in place[:-1]:
            held = getattr(held, name)
        setattr(held, place[-1], value)
    return twin
