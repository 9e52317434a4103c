"""How large a decoder's weights are, before one of them is read."""

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open

from dispfx.demo import DECODER_FOLDER
from dispfx.origin import origin_of

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def loaded_bytes(spec: str, dtype: torch.dtype | None) -> int | None:
    """Return the bytes of a decoder's weights once they are loaded, or None where only loading tells.

    That is so for the hub, for functions, for other files than safetensors and GGUF, and for files that
    loading will refuse.

    Args:
        spec: MODEL.
        dtype: to load them in; None keeps that of the weights, and float32 for GGUF.
    """
    origin = origin_of(spec)
    try:
        if origin == "gguf":
            return _gguf_elements(Path(spec).expanduser()) * _width(dtype, "F32")
        if origin in ("demo", "folder"):
            folder = DECODER_FOLDER if origin == "demo" else Path(spec).expanduser()
            return _folder_bytes(folder, dtype)
    except (OSError, SafetensorError, ValueError, KeyError, IndexError):
        pass
    return None


def _folder_bytes(folder: Path, dtype: torch.dtype | None) -> int | None:
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                view = opened.get_slice(name)
                total += torch.Size(view.get_shape()).numel() * _width(dtype, view.get_dtype())
    return total if files else None


def _gguf_elements(path: Path) -> int:
    reader: Any = GGUFReader(path)
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _width(dtype: torch.dtype | None, stored: str) -> int:
    return _BYTES.get(stored, 8) if dtype is None else dtype.itemsize
