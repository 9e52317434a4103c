"""Evenly spaced pieces of a file, so that a file of any size is read in bounded time and memory.

1. A file within the limit is one piece.
2. In a larger file, pieces of equal length begin at equal distances, the first at the file's start.  They
   depend only on the file's size and the limit.
3. The reader of a piece cuts it at line breaks.
"""

from dataclasses import dataclass
from pathlib import Path

from dispfx.errors import DataError

# Long compared with a training sequence, so that few sequences cross from one piece to the next.
_PIECE_BYTES = 2**20
_FEWEST_PIECES = 16


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file."""

    start: int
    stop: int


def spans(size: int, most_bytes: int) -> list[Span]:
    """Return the pieces of a file of `size` bytes to read: at most `most_bytes` in total."""
    if size <= most_bytes:
        return [Span(0, size)]
    length = max(1, min(_PIECE_BYTES, most_bytes // _FEWEST_PIECES))
    count = max(1, most_bytes // length)
    starts = [index * size // count for index in range(count)]
    return [Span(start, start + length) for start in starts]


def file_size(path: Path) -> int:
    """Return the bytes of a file.

    Raises:
        DataError: if there is no such file, or it is a folder or a pipe: a text is read twice, once to check
            it and once to learn from it.
    """
    if not path.is_file():
        found = "this is not a regular file" if path.exists() else "there is no such file"
        raise unreadable(path, OSError(0, found))
    return path.stat().st_size


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a text that cannot be read."""
    return DataError(f"the text cannot be read: {error.strerror or error}", where=str(path))
