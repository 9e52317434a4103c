"""UTF-8 files, byte for byte: line ends are part of the text that is measured; a byte-order mark is not.

A large file is read in evenly spaced pieces, so that a file of any size takes bounded time and memory:

1. A file within the limit is one piece.
2. In a larger file, pieces of equal length begin at equal distances, the first at the file's start.  They
   depend only on the file's size and the limit.
3. The reader of a piece cuts it at line breaks.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dispfx.errors import DataError

_BLOCK_BYTES = 2**20
# Magic bytes of files that are often mistaken for text.
_OTHER_FORMS = {
    # Before UTF-16, whose mark begins that of UTF-32-LE.
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\xfd7zXZ": "an xz file",
    b"BZh": "a bzip2 file",
    b"PK\x03\x04": "a zip file",
    b"PAR1": "a parquet file",
    b"%PDF": "a PDF",
}

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


class PlainText:
    """A plain text file."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._path = path

    def size(self) -> int:
        """Return its bytes.

        Raises:
            DataError: if there is no such file.
        """
        return file_size(self._path)

    def texts(self, most_bytes: int) -> Iterator[str]:
        """Yield the text in order, block by block; a longer file in evenly spaced pieces.

        Raises:
            DataError: with the first byte that is not UTF-8.
        """
        size = self.size()
        try:
            with self._path.open("rb") as file:
                if size <= most_bytes:
                    yield from self._whole(file)
                else:
                    for span in spans(size, most_bytes):
                        yield self._piece(file, span)
        except OSError as error:
            raise unreadable(self._path, error) from error

    def _whole(self, file: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        done = 0
        while True:
            block = file.read(_BLOCK_BYTES)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise self._not_utf_8(done - held + error.start) from error
            text = text if done else text.removeprefix("\ufeff")
            if text:
                yield text
            if not block:
                return
            done += len(block)

    def _piece(self, file: BinaryIO, span: Span) -> str:
        """Return the complete lines of a span, or complete characters if it has no complete line."""
        file.seek(span.start)
        raw = file.read(span.stop - span.start)
        first = raw.find(b"\n") + 1 if span.start else 0
        last = raw.rfind(b"\n") + 1
        if first == 0 and span.start:
            first = _characters_begin(raw)
        kept = raw[first:last] if last > first else raw[first:]
        try:
            # Not final: the last character may be incomplete.
            text = codecs.getincrementaldecoder("utf-8")().decode(kept)
        except UnicodeDecodeError as error:
            raise self._not_utf_8(span.start + first + error.start) from error
        text = text if span.start else text.removeprefix("\ufeff")
        return text if text.endswith("\n") else text + "\n"

    def _not_utf_8(self, byte: int) -> DataError:
        like = other_form(self._path)
        return DataError(
            f"the text must be UTF-8, but byte {byte} is not" + (f": it looks like {like}" if like else ""),
            where=self.where,
            hint="convert the file",
        )


def other_form(path: Path) -> str | None:
    """Return the type of a file by its magic bytes, or None if it may be text."""
    with path.open("rb") as file:
        beginning = file.read(8)
    return next((form for mark, form in _OTHER_FORMS.items() if beginning.startswith(mark)), None)


def _characters_begin(raw: bytes) -> int:
    """Return the start of the first complete character: a character has at most three more bytes."""
    return next((index for index, byte in enumerate(raw[:4]) if byte & 0xC0 != 0x80), 0)
