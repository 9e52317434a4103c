"""Token files: a vector of integers named `tokens` in a safetensors file.

The file is mapped into memory, and only used sequences are read, so its size does not matter.  safetensors
checks the file, but does not map it: its map would be writable, for which the system reserves memory of the
file's size.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dispfx.errors import DataError
from dispfx.files.json_text import parse_json

TOKENS = "tokens"

# Small enough to stay in the CPU cache for the second pass.
_CHUNK_TOKENS = 2**18
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_TYPES = {
    "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64,
}  # fmt: skip


def stored_tokens(path: Path) -> Tensor:
    """Return the tokens of a file, 1-D, in the file's own integer type; read-only, they stay on disk.

    Raises:
        DataError: if this is not a safetensors file, or lacks a vector of integers of that name.
    """
    if not path.is_file():
        raise DataError("the token file does not exist", where=str(path))
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            found = file.get_slice(TOKENS) if TOKENS in names else None
            shape, kind = ((), "") if found is None else (tuple(found.get_shape()), found.get_dtype())
    except (SafetensorError, OSError) as error:
        raise DataError(f"this is not a safetensors file: {error}", where=str(path)) from error
    if found is None:
        raise DataError(
            f"a token file holds a tensor '{TOKENS}', but this one holds {names}", where=str(path)
        )
    if len(shape) != 1 or kind not in _TYPES:
        raise DataError(f"'{TOKENS}' must be a vector of integers, but is {kind} {shape}", where=str(path))
    if not shape[0]:
        raise DataError(f"'{TOKENS}' must hold token ids, but it is empty", where=str(path))
    mapped = np.memmap(path, _TYPES[kind], "r", offset=_offset(path), shape=shape)
    with warnings.catch_warnings():
        # torch warns that the tensor is read-only; nothing here writes to it.
        warnings.simplefilter("ignore")
        return torch.from_numpy(mapped)


def largest_id(tokens: Tensor, *, where: str) -> int:
    """Return the largest of (N,) token ids, N at least 1; the vector is read in pieces.

    Raises:
        DataError: if an id is negative, or does not fit in 31 bits.
    """
    # numpy is several times faster here, and supports unsigned integers.
    chunks = (chunk.cpu().numpy() for chunk in tokens.split(_CHUNK_TOKENS))
    lowest, highest = zip(*((int(ids.min()), int(ids.max())) for ids in chunks), strict=True)
    low, high, most = min(lowest), max(highest), torch.iinfo(torch.int32).max
    if low < 0 or high > most:
        raise DataError(
            f"'{TOKENS}' must hold token ids from 0 to {most:,}, but holds {low:,} to {high:,}",
            where=where,
        )
    return high


def joined_tokens(parts: list[Tensor]) -> Tensor:
    """Return (N,) ids of all parts in order: a single part unchanged, several as int32 in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.to(torch.int32) for part in parts])


def _offset(path: Path) -> int:
    """Return the offset of the tokens in a file that safetensors has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return _LENGTH_BYTES + length + parse_json(file.read(length))[TOKENS]["data_offsets"][0]
