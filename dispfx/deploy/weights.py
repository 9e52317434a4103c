"""The weight files of an output folder: `model.safetensors` or shards, and the index of either.

A single file has an index, too: engines that read every `*.safetensors` of a folder without an index would
take the plan for weights.

`write_tensors` makes them, `read_headers` says what is in them from their headers alone, and
`read_tensors` maps them into memory.  Reading trusts nothing: a damaged header, a dtype of another kind
and an index that names a file elsewhere are refused before a tensor is used.

The header's `format` is "pt", which accelerate asks for: names and shapes are those of the loaded model, so
its loaders can fill one from these files.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dispfx.errors import DataError, OutputError
from dispfx.files.disk import share
from dispfx.files.json_text import parse_json, read_json
from dispfx.files.unreadable import reason_and_hint
from dispfx.huggingface.layout import INDEX_NAMES, MARK

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_BUFFERS = "dispfx_index."
MAX_SHARD_BYTES = 5 * 10**9

_FORMAT = "pt"
# What file systems take, in bytes.
_LONGEST_NAME = 255
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """What a header says about one tensor; `file` is the name of the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    is_parameter: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


def write_tensors(
    folder: Path,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weight files and their index into `folder`; more than one file above `max_shard_bytes`.

    Args:
        parameters: by path, a tied one once; counted as parameters when the folder is read.
        buffers: by path; not counted.

    Raises:
        OutputError: if the files cannot be written.
    """
    tensors = {name: _alone(tensor) for name, tensor in {**parameters, **buffers}.items()}
    shards = _pack(tensors, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        metadata = {"format": _FORMAT, "buffers": json.dumps([name for name in names if name in buffers])}
        with _write_errors(folder / file):
            save_file({name: tensors[name] for name in names}, folder / file, metadata=metadata)
            share(folder / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with _write_errors(folder / INDEX_FILE):
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return what the weight files of `folder` hold, by name, without reading a tensor.

    Raises:
        DataError: if a file is missing or damaged, or the index and the files disagree.
    """
    stored: dict[str, StoredTensor] = {}
    weight_map = _weight_map(folder)
    for file in weight_files(folder):
        headers = _read_header(file)
        listed = (
            headers if weight_map is None else {name for name, at in weight_map.items() if at == file.name}
        )
        if set(listed) != set(headers):
            odd = min(set(listed) ^ set(headers))
            raise DataError(f"the index and the file disagree about {odd}", where=str(file))
        stored.update(headers)
    return stored


def read_tensors(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of `folder`, or those of `names`; their bytes are mapped and read when used.

    Raises:
        DataError: if a file is missing or damaged, or lacks a name.
    """
    headers = read_headers(folder)
    wanted = set(headers) if names is None else set(names)
    if missing := wanted - set(headers):
        raise DataError(f"the weights lack {min(missing)}", where=str(folder))
    tensors = {}
    for file in weight_files(folder):
        with _read_errors(file), safe_open(file, framework="pt") as opened:
            held = [name for name in opened.keys() if name in wanted]  # noqa: SIM118 - no mapping
            tensors.update({name: opened.get_tensor(name) for name in held})
    return tensors


def is_index(name: str) -> bool:
    """Whether a stored tensor is the index of a module, or of a site of a graph."""
    return name.startswith(INDEX_BUFFERS) or name.rpartition(".")[2] in INDEX_NAMES


def is_added(name: str) -> bool:
    """Whether dispfx added a stored tensor that no graph has: an index, or the mark of a decoder without."""
    return is_index(name) or name == MARK


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of `folder`, in the order of their names.

    Raises:
        DataError: if there are no weight files, or the index has an invalid file name.
    """
    weight_map = _weight_map(folder)
    names = [WEIGHTS_FILE] if weight_map is None else sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"a weight file is missing: {name}", where=str(folder))
    return [folder / name for name in names]


def count_parameters(folder: Path) -> int:
    """Count the parameters in the weight files from their headers; buffers are left out."""
    return sum(stored.size for stored in read_headers(folder).values() if stored.is_parameter)


def count_bytes(folder: Path) -> int:
    """Return the bytes of the weight files on disk, headers and index buffers included."""
    return sum(file.stat().st_size for file in weight_files(folder))


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor in a storage of its own: a view would take its whole base along."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _pack(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Return tensor names to file names from the index, or None where one file holds everything."""
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not index.exists():
        return None
    with _read_errors(index):
        weight_map = read_json(index)["weight_map"]
        for name, file in weight_map.items():
            _check_file_name(name, file)
    return weight_map


def _check_file_name(tensor: str, file: Any) -> None:
    plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
    if not plain or "\0" in file or len(os.fsencode(file)) > _LONGEST_NAME:
        raise ValueError(f"{tensor} must lie in a .safetensors file of this folder, not in {file!r}")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with _read_errors(file), safe_open(file, framework="pt") as opened:
        buffers = set(parse_json((opened.metadata() or {}).get("buffers", "[]")))
        found = {}
        for name in opened.keys():  # noqa: SIM118 - no mapping
            view = opened.get_slice(name)
            is_parameter = name not in buffers and not is_added(name)
            dtype = _DTYPES[view.get_dtype()]
            found[name] = StoredTensor(tuple(view.get_shape()), dtype, file.name, is_parameter)
        return found


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (
        SafetensorError,
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        reason, hint = reason_and_hint(file, error)
        raise DataError(f"the weights cannot be read: {reason}", where=str(file), hint=hint) from error


@contextmanager
def _write_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise OutputError(
            f"the weights cannot be written: {error}", where=str(file), hint="check the space left"
        ) from error
