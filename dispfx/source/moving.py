"""A decoder moves to a device and a type of number, also one whose class has a `to` of its own.

nn.Module:   model.to(device=…, dtype=…)
others:      model.to(device), then model.to(dtype): what TransformerLens takes, for one
"""

import inspect
from typing import Any

import torch
from torch import nn


def moved(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a decoder on a device, its floating-point tensors of a type; without one they keep theirs.

    A decoder that is there already is not asked to move.
    """
    wanted: dict[str, Any] = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    if all(_is_there(tensor, device, dtype) for tensor in (*model.parameters(), *model.buffers())):
        return model
    try:
        inspect.signature(model.to).bind(**wanted)
    except TypeError:
        for each in wanted.values():
            own: Any = model.to
            model = own(each) or model  # what moves in place may return nothing
        return model
    together: Any = model.to
    return together(**wanted) or model


def _is_there(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    same = dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype
    index = device.index if device.index is not None or device.type == "cpu" else tensor.device.index
    return same and tensor.device.type == device.type and tensor.device.index == index
