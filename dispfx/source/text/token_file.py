"""Token files: a vector of integers named `tokens` in a safetensors file.

The file is mapped into memory and read where a sequence is taken from it, so its size does not matter.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dispfx.errors import DataError

TOKENS = "tokens"

_CHUNK_TOKENS = 2**22


def stored_tokens(path: Path) -> Tensor:
    """Return the tokens of a file, 1-D, in the file's own integer type; they stay on disk.

    Raises:
        DataError: if this is no safetensors file, or holds no vector of integers of that name.
    """
    if not path.is_file():
        raise DataError("a token file was expected and there is none", where=str(path))
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tokens = file.get_tensor(TOKENS) if TOKENS in names else None
    except (SafetensorError, OSError) as error:
        raise DataError(f"this is no safetensors file: {error}", where=str(path)) from error
    if tokens is None:
        raise DataError(
            f"a token file holds a tensor '{TOKENS}', and this one holds {names}", where=str(path)
        )
    if tokens.dim() != 1 or not _is_integer(tokens.dtype):
        raise DataError(
            f"'{TOKENS}' must be one vector of integers and is {tokens.dtype} {tuple(tokens.shape)}",
            where=str(path),
        )
    if not len(tokens):
        raise DataError(f"'{TOKENS}' must hold token ids from 0 upwards, and it is empty", where=str(path))
    return tokens


def largest_id(tokens: Tensor, *, where: str) -> int:
    """Return the largest of (N,) token ids, N at least 1; the vector is read in pieces.

    Raises:
        DataError: if an id is negative, or has no place in 31 bits.
    """
    ends = [chunk.aminmax() for chunk in _chunks(tokens)]
    low, high = min(int(low) for low, _ in ends), max(int(high) for _, high in ends)
    if low < 0 or high > torch.iinfo(torch.int32).max:
        raise DataError(
            f"'{TOKENS}' must hold token ids from 0 upwards, and it holds {low} to {high}", where=where
        )
    return high


def joined_tokens(parts: list[Tensor]) -> Tensor:
    """Return (N,) ids of all parts in order: the only part as it is, several as int32 in memory."""
    return parts[0] if len(parts) == 1 else torch.cat([part.to(torch.int32) for part in parts])


def _chunks(tokens: Tensor) -> Iterator[Tensor]:
    """Yield (n,) int64 copies: torch has no minimum of unsigned integers."""
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        yield tokens[start : start + _CHUNK_TOKENS].to(torch.int64)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
