"""A module is afterwards as it was before, whatever its forward pass does to it.

Entry points: `module_kept` and `random_state_kept`, context managers that hold on success and on failure;
`called_with`, a call with other values that changes nothing; and `held_tensors`, the tensors that a module
holds, by path.

Kept are, of every object that is reached from the module's attributes:
1. what its attributes are: parameters, buffers, sub-modules, hooks, modes, plain attributes, `__slots__`;
2. what lists, dicts, sets and deques hold;
3. the values of tensors that are no parameters, of NumPy arrays, and of `bytearray` and `array.array`; not of
   files that NumPy maps into memory.

What is reached from globals and closures alone is not kept.
"""

import random
import re
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

# Nearest the module first; a data set or a tokenizer that it holds is not walked through to its end.
_MOST_OBJECTS = 200_000
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_NOT_FOLLOWED = (
    int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, FunctionType, MethodType,
    BuiltinFunctionType, ModuleType, nn.Parameter, fx.Graph,
)  # fmt: skip
# Modules hold their members in dicts of these names.
_MEMBER = re.compile(r"\._(?:buffers|modules)\['([^']*)'\]")


class ModuleState:
    """What a module, and everything that it holds, was at one time.

    Args:
        module: the module.
        values: whether the values of tensors are kept too, which copies them.
    """

    def __init__(self, module: nn.Module, *, values: bool = True):
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        for _, part in _reached(module):
            if values and isinstance(part, Tensor) and _is_plain(part):
                self._tensors.append((part, part.detach().clone()))
            elif values and _is_array(part):
                self._arrays.append((part, part[...].copy() if isinstance(part, np.ndarray) else part[:]))
            elif not isinstance(part, Tensor):
                self._containers += [(container, _items(container)) for container in _containers(part)]

    def restructured(self) -> bool:
        """Whether an attribute, or what a container holds, is another object than it was."""
        return any(not _same(_items(container), items) for container, items in self._containers)

    def restore(self) -> None:
        """Make everything what it was."""
        for container, items in self._containers:
            if isinstance(container, _Slots):
                container.restore(items)
            elif not _same(_items(container), items):
                # What a subclass does with its items is its own.
                kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
                fill = kind.extend if kind in (list, deque) else kind.update
                kind.clear(container)
                fill(container, items)
        with torch.no_grad():
            for tensor, value in self._tensors:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for held, value in self._arrays:
            if isinstance(held, np.ndarray):
                np.copyto(held, value)
            elif held != value:
                held[:] = value


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds anywhere, parameters left out, each with its path once.

    A path is that of a buffer, or such as `layers.0.state['count'][1]`.
    """
    for place, part in _reached(module):
        if isinstance(part, Tensor) and _is_plain(part):
            yield _MEMBER.sub(r".\1", "".join(_spelled(place))).removeprefix("."), part


@dataclass(frozen=True)
class _Place:
    """Where an object is held: as an attribute, or as an item of a container."""

    holder: "_Place | None"
    name: Any
    is_item: bool


def _spelled(place: _Place | None) -> list[str]:
    parts = []
    while place is not None:
        parts.append(f"[{place.name!r}]" if place.is_item else f".{place.name}")
        place = place.holder
    return parts[::-1]


def _reached(module: nn.Module) -> Iterator[tuple[_Place | None, Any]]:
    """Yield every object that is reached from a module's attributes once, the nearest first."""
    seen: dict[int, Any] = {}  # by id, and holding what has it, so that no id is given twice
    waiting: deque[tuple[_Place | None, Any]] = deque([(None, module)])
    while waiting and len(seen) < _MOST_OBJECTS:
        place, part = waiting.popleft()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        yield place, part
        if not isinstance(part, Tensor):
            for container in (part, *_containers(part)) if isinstance(part, tuple) else _containers(part):
                entries = (
                    enumerate(container) if not isinstance(container, dict | _Slots) else container.items()
                )
                waiting.extend(
                    (_Place(place, name, container is part), item)
                    for name, item in entries
                    if not isinstance(item, _NOT_FOLLOWED)
                )


class _Slots:
    """The attributes of an object that its class names in `__slots__`."""

    def __init__(self, owner: Any):
        self.owner = owner

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield each attribute that is set."""
        for name, slot in _slots_of(type(self.owner)):
            with suppress(AttributeError):
                yield name, slot.__get__(self.owner)

    def restore(self, items: list[tuple[str, Any]]) -> None:
        """Set each attribute to what it was, also where the class forbids it; delete all that were added."""
        before = dict(items)
        for name, slot in _slots_of(type(self.owner)):
            if name in before:
                slot.__set__(self.owner, before[name])
            else:
                with suppress(AttributeError):
                    slot.__delete__(self.owner)


@lru_cache(4096)
def _slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the slots of a class written in Python, and of its bases, with their names."""
    named = [vars(one) for one in kind.__mro__ if "__slots__" in vars(one)]
    return tuple(
        (name, slot)
        for members in named
        for name, slot in members.items()
        if isinstance(slot, MemberDescriptorType)
    )


def _containers(value: Any) -> list[Any]:
    """Return what holds an object's items and its attributes, and may be changed."""
    found: list[Any] = [
        one for one in (value, getattr(value, "__dict__", None)) if isinstance(one, _CONTAINERS)
    ]
    return [*found, _Slots(value)] if _slots_of(type(value)) else found


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numbers that may be written, and that lies in memory."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and not isinstance(value, np.memmap) and value.dtype != object
    return isinstance(value, bytearray | array)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict | _Slots) else list(container)


def _same(found: list[Any], before: list[Any]) -> bool:
    """Whether two lists, of values or of pairs of a name and a value, hold the same objects."""
    return len(found) == len(before) and all(
        one is other or (isinstance(one, tuple) and isinstance(other, tuple) and _same([*one], [*other]))
        for one, other in zip(found, before, strict=True)
    )


@contextmanager
def module_kept(module: nn.Module, *, values: bool = True) -> Iterator[ModuleState]:
    """Put a module back, at the end, into the state in which it is now."""
    state = ModuleState(module, values=values)
    try:
        yield state
    finally:
        state.restore()


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Run in evaluation mode and not compiled inside the block; modes are as before at its end.

    A compiled module rounds in another way than its class does.
    """
    training = [one for one in module.modules() if one.training]
    # `eval` is not allowed on exported programs, which are said to be in training mode.
    for one in training:
        one.training = False
    try:
        with torch.compiler.set_stance("force_eager") if _is_compiled(module) else nullcontext():
            yield
    finally:
        for one in training:
            one.training = True


def called_with(
    module: nn.Module, tensors: Mapping[str, Tensor], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Return what a module gives with other values for its tensors, by path; the module is not changed.

    `torch.func.functional_call` swaps a tensor once for each of its paths.  In a module that stands at two
    places it then takes the new value for the old one, and leaves it there.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    own |= dict(module.named_buffers(remove_duplicate=False))
    values = {id(own[path]): value for path, value in tensors.items() if path in own}
    swapped = {path: value for path, value in tensors.items() if path not in own}
    for prefix, part in module.named_modules():  # each once
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if id(tensor) in values:
                swapped[f"{prefix}.{name}".lstrip(".")] = values[id(tensor)]
    return torch.func.functional_call(module, swapped, arguments, dict(options), tie_weights=False)


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` was called on a module, or its method `compile` on it or a part of it."""
    return any(vars(one).get("_compiled_call_impl") or hasattr(one, "_orig_mod") for one in module.modules())


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the random states of Python, NumPy and torch back, of CUDA too where it is in use."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
