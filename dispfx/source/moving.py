"""Move a decoder to a device and dtype, also if its class overrides `to`.

nn.Module:   model.to(device=…, dtype=…)
overridden:  model.to(device), then model.to(dtype), as TransformerLens expects
"""

import inspect
from typing import Any

import torch
from torch import nn


def moved(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a decoder on a device, with floating-point tensors of a dtype; None keeps their dtypes.

    `to` is not called if nothing has to change.
    """
    wanted: dict[str, Any] = {"device": device} if dtype is None else {"device": device, "dtype": dtype}
    if all(_is_there(tensor, device, dtype) for tensor in (*model.parameters(), *model.buffers())):
        return model
    try:
        inspect.signature(model.to).bind(**wanted)
    except TypeError:
        for step in wanted.values():
            own: Any = model.to
            model = own(step) or model  # an in-place `to` may return None
        return model
    together: Any = model.to
    return together(**wanted) or model


def _is_there(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> bool:
    same = dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype
    index = device.index if device.index is not None or device.type == "cpu" else tensor.device.index
    return same and tensor.device.type == device.type and tensor.device.index == index
