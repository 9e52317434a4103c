"""The modules of a pruned decoder that are not ordinary smaller ones.

`selecting` makes a norm gather its output, once for all its readers.  `PrunedModule` holds an ordinary
smaller module and gathers before it, after it, or both:

    x → x[…, read] → linear → pad with a zero → [write]

The zero that pruned features point at is part of the computation and not of the weight: zero rows in a
weight would learn with the first optimizer step.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispfx.huggingface.layout import INNER, READ, SELECT, WRITE


class PrunedModule(nn.Module):
    """An ordinary module on fewer features, with the interface of the one that it stands for.

    Args:
        inner: maps the last dimension of its first argument to the last of its result.
        read: (K,) int32 positions of the input that `inner` takes, or None where it takes all.
        padded: whether `read` may point one past the last feature, at a zero.
        write: (N,) int32 place of every output feature in the result of `inner`, or one past its last
            where the feature is zero; None where the result is the output.
    """

    dispfx_read: Tensor | None
    dispfx_write: Tensor | None

    def __init__(
        self,
        inner: nn.Module,
        read: Tensor | None = None,
        write: Tensor | None = None,
        *,
        padded: bool = False,
    ):
        super().__init__()
        self.linear = inner
        self.padded = padded
        self.register_buffer(READ, read)
        self.register_buffer(WRITE, write)
        self.training = inner.training
        # What a decoder may ask of the module.  What is put around it later (an adapter) stays its own.
        own = {INNER, READ, WRITE}
        self._given = (_names_of_class(type(inner)) | _own_names(inner)) - own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the dense module would, with zeros for pruned features of the output."""
        if self.dispfx_read is not None:
            args, kwargs = self._selected(self.dispfx_read, args, kwargs)
        result = self.linear(*args, **kwargs)
        if self.dispfx_write is None:
            return result
        if isinstance(result, tuple):
            return (_scattered(result[0], self.dispfx_write), *result[1:])
        return _scattered(result, self.dispfx_write)

    def _selected(self, read: Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (_gathered(args[0], read, self.padded), *args[1:]), kwargs
        first = next(iter(inspect.signature(self.linear.forward).parameters))
        return args, {**kwargs, first: _gathered(kwargs[first], read, self.padded)}

    def __getattr__(self, name: str) -> Any:
        """Give what the inner module had at first: a decoder may ask its projection for a dtype."""
        if name in self.__dict__.get("_given", ()):
            return getattr(self.linear, name)
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Say which widths the module has outside."""
        read, write = self.dispfx_read, self.dispfx_write
        parts = [f"reads {len(read)} features"] if read is not None else []
        parts += [f"writes {len(write)} features"] if write is not None else []
        return ", ".join(parts)


class _Selecting:
    """Mixed into a norm's class: the norm sees all features and gives the kept ones."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).index_select(-1, getattr(self, SELECT))  # type: ignore[misc]


@cache
def _selecting_class(norm: type[nn.Module]) -> type[nn.Module]:
    return type(norm.__name__, (_Selecting, norm), {"__module__": norm.__module__, "__doc__": norm.__doc__})


def selecting(norm: nn.Module, kept: Tensor) -> None:
    """Let a norm gather its output by `kept` (K,) int32 after its own forward; its class stays a base."""
    norm.__class__ = _selecting_class(type(norm))
    norm.register_buffer(SELECT, kept)


@cache
def _names_of_class(of: type[nn.Module]) -> frozenset[str]:
    return frozenset(name for name in dir(of) if not name.startswith("_") and not hasattr(nn.Module, name))


def _own_names(module: nn.Module) -> set[str]:
    names = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    return {name for name in names if not name.startswith("_") and not hasattr(nn.Module, name)}


def _gathered(x: Tensor, read: Tensor, padded: bool) -> Tensor:
    return (F.pad(x, (0, 1)) if padded else x).index_select(-1, read)


def _scattered(x: Tensor, write: Tensor) -> Tensor:
    return F.pad(x, (0, 1)).index_select(-1, write)


def index_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the index buffers of a decoder by path."""
    return {
        path: buffer
        for path, buffer in module.named_buffers()
        if path.rpartition(".")[2] in (SELECT, READ, WRITE)
    }


def empty_index(length: int, device: torch.device) -> Tensor:
    """Return room for `length` indices."""
    return torch.empty(length, dtype=torch.int32, device=device)
