"""JSON, plain or gzipped: one object per line, or a list of objects; one field of each holds the text."""

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from dispfx.errors import DataError
from dispfx.files.json_text import parse_json
from dispfx.source.text.documents import joined, text_of, until_full
from dispfx.source.text.json_array import is_array, records_of
from dispfx.source.text.plain import Span, file_size, other_form, spans, unreadable
from dispfx.words.text_origin import LINE_BREAK

# A file without line breaks, such as one JSON document, must not be read into memory at once.
_LONGEST_LINE_BYTES = 64 * 2**20


class JsonLines:
    """A `.jsonl`, `.ndjson` or `.json` file, plain or with `.gz` after that.

    1. A longer file of lines is sampled in evenly spaced pieces: the lines that begin in them are read.
    2. A gzipped file does not allow random access, so it is read from its start; so is a list of records.
       3. A byte-order mark is not part of the first line.
    """

    def __init__(self, path: Path, field: str, between: str = LINE_BREAK):
        self.where = str(path)
        self._path = path
        self._field = field
        self._between = between
        self._packed = path.suffix.lower() == ".gz"

    def size(self) -> int | None:
        """Return its bytes, or None if unknown before reading.

        Raises:
            DataError: if there is no such file.
        """
        size = file_size(self._path)
        return None if self._packed else size

    def texts(self, most_bytes: int) -> Iterator[str]:
        """Yield the texts in order, with line breaks or the given separator between them.

        Raises:
            DataError: with the first line that is broken, lacks the field, or holds no text in it.
        """
        try:
            yield from joined(self._documents(most_bytes), self._between)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"this is not a complete gzip file: {error}", where=self.where) from error
        except OSError as error:
            raise unreadable(self._path, error) from error

    def _documents(self, most_bytes: int) -> Iterator[str]:
        size = self.size()
        with self._path.open("rb") if size is not None else gzip.open(self._path, "rb") as opened:
            file = cast(BinaryIO, opened)
            if is_array(file):
                yield from until_full(self._in_array(file), most_bytes)
            elif size is None:
                # Read to the end or to the limit, whichever comes first.
                yield from until_full(self._in_span(file, None), most_bytes)
            else:
                for span in spans(size, most_bytes):
                    yield from self._in_span(file, None if span == Span(0, size) else span)

    def _in_array(self, file: BinaryIO) -> Iterator[str]:
        """Yield the text of every record of a list."""
        try:
            for number, record in enumerate(records_of(file, _LONGEST_LINE_BYTES), start=1):
                yield text_of(record, self._field, where=self.where, record_name=f"record {number}")
        except UnicodeDecodeError as error:
            raise DataError("this list of JSON records is not UTF-8", where=self.where) from error
        except ValueError as error:
            raise DataError(f"this is not a list of JSON records: {error}", where=self.where) from error

    def _in_span(self, file: BinaryIO, span: Span | None) -> Iterator[str]:
        """Yield the text of every line that begins in a span, or of every line."""
        for name, line in self._lines(file) if span is None else self._lines_in(file, span):
            if line.strip():
                yield text_of(self._parsed(line, name), self._field, where=self.where, record_name=name)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
        number = 1
        while line := file.readline(_LONGEST_LINE_BYTES + 1):
            self._check_length(line, f"line {number}")
            yield f"line {number}", line if number > 1 else line.removeprefix(codecs.BOM_UTF8)
            number += 1

    def _lines_in(self, file: BinaryIO, span: Span) -> Iterator[tuple[str, bytes]]:
        start = span.start
        if start:
            # The line with the previous byte belongs to the previous span, even if it ends there.
            file.seek(start - 1)
            skipped = file.readline(_LONGEST_LINE_BYTES + 1)
            self._check_length(skipped, f"the line around byte {start:,}")
            start += len(skipped) - 1
        else:
            file.seek(0)
        while start < span.stop and (line := file.readline(_LONGEST_LINE_BYTES + 1)):
            name = f"the line at byte {start:,}"
            self._check_length(line, name)
            yield name, line if start else line.removeprefix(codecs.BOM_UTF8)
            start += len(line)

    def _check_length(self, line: bytes, name: str) -> None:
        if len(line) > _LONGEST_LINE_BYTES:
            raise DataError(
                f"{name} is longer than {_LONGEST_LINE_BYTES:,} bytes", where=self.where,
                hint="JSON lines hold one record per line; is this one JSON document?",
            )  # fmt: skip

    def _parsed(self, line: bytes, name: str) -> object:
        try:
            return parse_json(line)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name} is not UTF-8 at its byte {error.start}{self._looks()}", where=self.where
            ) from error
        except ValueError as error:
            raise DataError(
                f"{name} is not JSON: {error}", where=self.where,
                hint="a file holds one JSON record per line, or one list of records",
            ) from error  # fmt: skip

    def _looks(self) -> str:
        like = other_form(self._path)
        return f": the file looks like {like}" if like else ""
