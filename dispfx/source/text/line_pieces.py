"""Evenly spaced pieces of a file, so that a file of any size is read in bounded time and memory.

1. A file that may be read whole is one piece.
2. Of a larger one, pieces of equal length begin at equal distances, the first at the file's start.  What
   they are depends on the file's size and the bytes that may be read, and on nothing else.
3. Whoever reads a piece cuts it at line breaks.
"""

from dataclasses import dataclass
from pathlib import Path

from dispfx.errors import DataError

# Long beside a sequence that is learned from, so that few sequences cross from one piece to the next.
_PIECE_BYTES = 2**20
_FEWEST_PIECES = 16


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file."""

    start: int
    stop: int


def spans(size: int, most_bytes: int) -> list[Span]:
    """Return what to read of a file of `size` bytes: at most `most_bytes` in all."""
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
        found = "this is no regular file" if path.exists() else "there is no such file"
        raise unreadable(path, OSError(0, found))
    return path.stat().st_size


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the error for a text that the system does not let us read."""
    return DataError(f"the text cannot be read: {error.strerror or error}", where=str(path))
