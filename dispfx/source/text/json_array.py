"""A list of JSON records, `[{"text": …}, {"text": …}]`, read one record after the other.

Only one record is held in memory, so the list may have any length.
"""

import codecs
import re
from collections.abc import Iterator
from typing import BinaryIO

from dispfx.files.json_text import json_value_at

_BLOCK_BYTES = 2**20
_SPACE = re.compile(r"[ \t\r\n]*")


def is_array(file: BinaryIO) -> bool:
    """Whether the first non-space byte opens a list; the file is left at its start."""
    beginning = file.read(_BLOCK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return beginning.startswith(b"[")


def records_of(file: BinaryIO, most_bytes: int) -> Iterator[object]:
    """Yield the values of a list.

    Args:
        file: at its start.
        most_bytes: of one record.

    Raises:
        ValueError: if the file holds anything but one list, or a record is longer.
    """
    text = _Text(file, most_bytes)
    text.take("[")
    if text.next_letter() == "]":
        text.take("]")
    else:
        yield text.value()
        while text.next_letter() == ",":
            text.take(",")
            yield text.value()
        text.take("]")
    if text.next_letter():
        raise ValueError("there is something after the list")


class _Text:
    """A buffer over a file, and the position in it."""

    def __init__(self, file: BinaryIO, most_bytes: int):
        self._file = file
        self._most_bytes = most_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._held, self._used = "", 0

    def next_letter(self) -> str:
        """Return the next non-space character without consuming it; empty at the end."""
        while True:
            space = _SPACE.match(self._held, self._used)
            self._used = self._used if space is None else space.end()
            if self._used < len(self._held) or not self._more():
                return self._held[self._used : self._used + 1]

    def take(self, letter: str) -> None:
        """Consume one character, and the spaces before it."""
        if (found := self.next_letter()) != letter:
            raise ValueError(f"{letter!r} was expected, but {found or 'the end of the file'!r} was found")
        self._used += 1

    def value(self) -> object:
        """Consume one value and return it."""
        self.next_letter()
        while True:
            try:
                found, self._used = json_value_at(self._held, self._used)
                return found
            except ValueError:
                if len(self._held) - self._used > self._most_bytes:
                    raise ValueError(f"a record is longer than {self._most_bytes:,} bytes") from None
                if not self._more():
                    raise

    def _more(self) -> bool:
        """Read on, if there is more."""
        block = self._file.read(_BLOCK_BYTES)
        self._held, self._used = self._held[self._used :] + self._decoder.decode(block, final=not block), 0
        return bool(block)
