"""The size of a decoder's weights, before they are read."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dispfx.demo import DECODER_FOLDER
from dispfx.files.json_text import read_json
from dispfx.words.model_origin import origin_of

# Bytes per element by safetensors dtype; packed types below a byte count as one.
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4}
_BYTES |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def loaded_bytes(spec: str, dtype: torch.dtype | None) -> int | None:
    """Return the bytes of a decoder's weights in memory, or None if unknown before loading.

    It is unknown for the hub, for functions, for files other than safetensors and GGUF, and for invalid
    files.

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
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, AttributeError, TypeError):
        pass
    return None


def _folder_bytes(folder: Path, dtype: torch.dtype | None) -> int | None:
    files = _loaded_files(folder)
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                view = opened.get_slice(name)
                total += torch.Size(view.get_shape()).numel() * _width(dtype, view.get_dtype())
    return total if files else None


def _loaded_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads; the folder may contain more files.

    As `_get_resolved_checkpoint_files` of transformers 5.24: the file named by the config,
    `model.safetensors`, or the files in its index, whichever exists first.

    Raises:
        OSError, ValueError, KeyError, AttributeError, TypeError: if config or index cannot be read.
    """
    named = read_json(folder / "config.json").get("transformers_weights")
    for name in [named] if named else ["model.safetensors", "model.safetensors.index.json"]:
        if not _inside(folder, name).is_file():
            continue
        if not name.endswith(".index.json"):
            return [folder / name]
        names = set(read_json(folder / name)["weight_map"].values())
        return sorted(_inside(folder, file) for file in names)
    return []


def _inside(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} leads out of the folder")
    return folder / name


def _gguf_elements(path: Path) -> int:
    from gguf import GGUFReader

    reader: Any = GGUFReader(path)
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


def _width(dtype: torch.dtype | None, stored: str) -> int:
    is_real = stored.startswith(("F", "BF"))
    return dtype.itemsize if dtype is not None and is_real else _BYTES.get(stored, 1)
