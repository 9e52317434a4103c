"""The modules of a pruned decoder are smaller, and gather their input or output.

    x → x[…, read] → module → pad with a zero → [write]        x → norm → [select]

1. A module keeps its class, its path and the names of its tensors, so loaders and tools find it as in the
   dense decoder.  Forward hooks gather with index buffers of the module.
2. A replacement of a module, such as an adapter or a quantised layer, gets the hooks, because the rest of the
   decoder still has the full width.  The old module, which may be inside the new one, loses them.
3. The zero for pruned features is part of the computation, not of the weight: the first optimizer step would
   change zero rows of a weight.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from dispfx.errors import DispfxError
from dispfx.huggingface.index_values import remember_index, require_unchanged
from dispfx.huggingface.layout import INDEX_NAMES, READ, SELECT, WRITE


@dataclass(frozen=True)
class GatherInput:
    """A forward pre-hook: the module gets the features of its first argument that `dispfx_read` names.

    Args:
        padded: whether the index may point one past the last feature, at a zero.
    """

    padded: bool

    def __call__(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments with the first one gathered, by position or by name.

        Raises:
            DispfxError: if the hook was copied to a module that took the pruned one's place.
        """
        if kwargs is None:
            raise _without_index(module, READ)
        if args:
            return (self._gathered(module, args[0]), *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters))
        return args, {**kwargs, first: self._gathered(module, kwargs[first])}

    def _gathered(self, module: nn.Module, x: Tensor) -> Tensor:
        return (F.pad(x, (0, 1)) if self.padded else x).index_select(-1, _index(module, READ, x))


@dataclass(frozen=True)
class GatherOutput:
    """A forward hook: the first result of the module is gathered.

    Args:
        name: of the index; `dispfx_write` may point one past the last feature, at a zero.
    """

    name: str

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> Any:
        """Return the result with its first tensor gathered."""
        if isinstance(result, tuple):
            return (self._gathered(module, result[0]), *result[1:])
        return self._gathered(module, result)

    def _gathered(self, module: nn.Module, x: Tensor) -> Tensor:
        return (F.pad(x, (0, 1)) if self.name == WRITE else x).index_select(-1, _index(module, self.name, x))


def make_gathering(
    module: nn.Module, indices: dict[str, Tensor], *, padded: bool = False, filled: bool = True
) -> None:
    """Let a module gather by its indices, int32 (K,), which become its buffers.

    Args:
        indices: by the names in `dispfx.huggingface.layout`.
        padded: whether the one for reading may point at a zero.
        filled: whether the indices have their values, which a module holds on to.
    """
    for name, index in indices.items():
        module.register_buffer(name, index)
        if filled:
            remember_index(module, name, index)
    gathers: list[GatherInput | GatherOutput] = [GatherInput(padded)] if READ in indices else []
    _attach(module, gathers + [GatherOutput(name) for name in (WRITE, SELECT) if name in indices])


def index_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the index buffers of a decoder by path."""
    return {path: buffer for path, buffer in module.named_buffers() if path.rpartition(".")[2] in INDEX_NAMES}


def empty_index(length: int, device: torch.device) -> Tensor:
    """Return room for `length` indices."""
    return torch.empty(length, dtype=torch.int32, device=device)


def held_index(owner: nn.Module, name: str) -> Tensor:
    """Return an index of a module, from the disk where accelerate keeps it there."""
    index = owner._buffers[name]
    assert index is not None
    hook = getattr(owner, "_hf_hook", None) if index.is_meta else None
    maps = [getattr(part, "weights_map", None) for part in getattr(hook, "hooks", (hook,))]
    return next((held[name] for held in maps if held is not None), index)


def _index(module: nn.Module, name: str, x: Tensor) -> Tensor:
    owner = module if name in module._buffers else _owner(module, name)
    index = owner._buffers[name]
    assert index is not None
    require_unchanged(owner, name, index)
    if index.device != x.device:
        # Kept on disk, or the module's own code moves what it is given to where its weights are.
        index = held_index(owner, name).to(x.device)
    return index


def _owner(module: nn.Module, name: str) -> nn.Module:
    """Return the module with the index inside of what has replaced it."""
    for inner in module.modules():
        if name in inner._buffers:
            return inner
    raise _without_index(module, name)


def _without_index(module: nn.Module, name: str) -> DispfxError:
    kind = type(module)
    return DispfxError(
        f"a {kind.__name__} took the place of a pruned module and its hooks, but not its index {name}",
        where=f"{kind.__module__}.{kind.__name__}",
        hint="torch.ao.quantization replaces modules this way; quantize with torchao.quantization.quantize_ "
        "(docs/huggingface.md), and replace modules with set_submodule",
    )


def _attach(module: nn.Module, gathers: list[GatherInput | GatherOutput]) -> None:
    for gather in gathers:
        if isinstance(gather, GatherInput):
            module.register_forward_pre_hook(gather, with_kwargs=True)
        else:
            module.register_forward_hook(gather)


def _detach(module: nn.Module) -> list[GatherInput | GatherOutput]:
    """Take the hooks of this file off a module, and return them."""
    found: list[GatherInput | GatherOutput] = []
    for hooks, kinds in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(hook, GatherInput | GatherOutput):
                found.append(hook)
                del hooks[key]
                kinds.pop(key, None)
    return found


def _follow(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Give what replaces a module at its path the hooks, and the indices if it lacks them (rule 2)."""
    old = parent._modules.get(name)
    if old is None or module is None or module is old:
        return
    gathers = _detach(old)
    if not gathers:
        return
    inside = list(module.modules())
    for inner in inside:
        _detach(inner)  # a copy of the old module has them, too
    for index in INDEX_NAMES:
        if index in old._buffers and not any(index in inner._buffers for inner in inside):
            held = held_index(old, index)
            require_unchanged(old, index, held)
            module.register_buffer(index, old._buffers[index])
            remember_index(module, index, held)
    _attach(module, gathers)


register_module_module_registration_hook(_follow)
