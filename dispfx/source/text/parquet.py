"""Parquet files: one column holds the text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dispfx.errors import DataError
from dispfx.source.text.documents import joined, missing_field, text_of, until_full
from dispfx.source.text.plain import file_size, unreadable
from dispfx.words.extras import library
from dispfx.words.text_origin import LINE_BREAK

_BATCH_ROWS = 256
_BUFFER_BYTES = 2**20
_MOST_GROUPS = 256


class Parquet:
    """A `.parquet` file; a longer one is sampled at the beginnings of evenly spaced row groups."""

    def __init__(self, path: Path, field: str, between: str = LINE_BREAK):
        self.where = str(path)
        self._path = path
        self._field = field
        self._between = between

    def size(self) -> int:
        """Return the bytes of the column.

        Raises:
            DataError: if this is not a parquet file, or the column is missing.
        """
        with self._opened() as file:
            return sum(self._group_bytes(file))

    def texts(self, most_bytes: int) -> Iterator[str]:
        """Yield the texts in order, with line breaks or the given separator between them.

        Raises:
            DataError: as for `size`, and for the first row without text.
        """
        with self._opened() as file:
            yield from joined(self._documents(file, most_bytes), self._between)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        needed = "pyarrow is needed to read this text, but it"
        arrow, parquet = (
            library(name, "data", needed, where=self.where) for name in ("pyarrow", "pyarrow.parquet")
        )
        file_size(self._path)
        try:
            # Buffered, to avoid reading a complete row group into memory.
            with parquet.ParquetFile(self._path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
                yield file
        except UnicodeDecodeError as error:
            raise DataError(f"{self._field!r} holds text that is not UTF-8", where=self.where) from error
        except arrow.ArrowException as error:
            raise DataError(f"this parquet file cannot be read: {error}", where=self.where) from error
        except OSError as error:
            raise unreadable(self._path, error) from error

    def _documents(self, file: Any, most_bytes: int) -> Iterator[str]:
        sizes = self._group_bytes(file)
        if sum(sizes) <= most_bytes:
            for group in range(len(sizes)):
                yield from self._in_group(file, group)
            return
        count = min(len(sizes), _MOST_GROUPS)
        for index in range(count):
            yield from until_full(
                self._in_group(file, index * len(sizes) // count), max(1, most_bytes // count)
            )

    def _in_group(self, file: Any, group: int) -> Iterator[str]:
        row = sum(file.metadata.row_group(before).num_rows for before in range(group))
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self._field]):
            for record in batch.to_pylist():
                row += 1
                yield text_of(record, self._field, where=self.where, record_name=f"row {row}")

    def _group_bytes(self, file: Any) -> list[int]:
        """Return the uncompressed bytes of the column in every row group."""
        paths = [file.schema.column(index).path for index in range(len(file.schema))]
        # A dot is part of a column's name, or separates a nested field.
        own = [index for index, path in enumerate(paths) if f"{path}.".startswith(f"{self._field}.")]
        if not own:
            names = list(file.schema_arrow.names)
            raise missing_field(self._field, names, where=self.where, record_name="the table")
        return [self._bytes_in_group(file, group, own) for group in range(file.metadata.num_row_groups)]

    def _bytes_in_group(self, file: Any, group: int, own: list[int]) -> int:
        # Read it first: pyarrow aborts the process if asked about a damaged column, but not if it reads one.
        next(file.iter_batches(1, row_groups=[group], columns=[self._field]), None)
        described = file.metadata.row_group(group)
        if described.num_columns <= max(own):
            raise DataError(f"part {group + 1} of the table lacks columns", where=self.where)
        return sum(described.column(index).total_uncompressed_size for index in own)
