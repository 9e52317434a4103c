"""The device that a user chose, checked against the devices of this machine.

The name is checked before torch is imported, so that a typo is reported at once.
"""

import os
import re
from typing import TYPE_CHECKING

from dispfx.errors import DispfxError
from dispfx.words.option_names import option

if TYPE_CHECKING:
    import torch

_WORD = re.compile(r"cpu(:0)?|cuda(:(0|[1-9][0-9]{0,3}))?")


def chosen_device(device: "str | torch.device | None") -> "torch.device":
    """Return a device to compute on; the CPU for None.

    Raises:
        DispfxError: as `check_device`.
    """
    check_device(device)
    import torch

    return torch.device("cpu" if device is None else device)


def check_device(device: "str | torch.device | None") -> None:
    """Raise if the device is not available; None is the CPU.

    Raises:
        DispfxError: if it is neither the CPU nor a CUDA device, or torch does not see it.
    """
    word = "cpu" if device is None else str(device)
    if not _WORD.fullmatch(word):
        raise DispfxError(
            f"{option('device')} must be cpu, cuda or cuda:N, and {word!r} was given",
            hint="dispfx runs on CPUs and on CUDA devices; `dispfx doctor` lists those of this machine",
        )
    if word.startswith("cpu"):
        return
    import torch

    found = torch.cuda.device_count()
    if int(word.partition(":")[2] or 0) >= found:
        raise DispfxError(
            f"{option('device', word)} was given, but torch sees {found or 'no'} CUDA device(s)",
            hint=f"use {option('device', 'cpu')}, or install a CUDA build of torch"
            if not found
            else f"use {option('device', f'cuda:{found - 1}')} or below",
        )


def require_default_device(*, meta: bool = False) -> None:
    """Raise if torch makes new tensors elsewhere than on the CPU, where no device is named.

    Args:
        meta: whether they may have no values.

    Raises:
        DispfxError: with the default device.
    """
    import torch

    default = torch.get_default_device()
    if default.type != "cpu" and not (meta and default.type == "meta"):
        raise DispfxError(
            f"the default device of torch must be the CPU here, and it is {default}",
            hint="call torch.set_default_device('cpu'), or leave `with torch.device(...)`; "
            "decoders may be on any device",
        )


def local_device(device: str | None) -> str | None:
    """Return the GPU of this process if `cuda` was given and several processes share a host."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if device == "cuda" and local is not None else device
