"""Data sets that the `datasets` library loads, from the hub or from a folder, as a stream.

1. Reading stops when enough was read, so a large data set is not downloaded completely.
2. The length of a data set is unknown before it is read.  So its files form at most 16 groups, in order; an
   equal share is read from the start of every group, and the rest of the limit goes to groups with more text,
   in order.  A short data set is read completely, in its order.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from dispfx.errors import DataError
from dispfx.source.quiet import short
from dispfx.source.text.documents import joined, missing_field, text_of, until_full
from dispfx.words.extras import library
from dispfx.words.text_origin import DATASET, LINE_BREAK, TextOrigin

_MOST_GROUPS = 16
_HUB_SECONDS = 10.0
# Marks a folder written by `save_to_disk`, which needs `load_from_disk`.
_SAVED = ("dataset_dict.json", "dataset_info.json")


class NamedDataset:
    """A split of a data set."""

    def __init__(self, origin: TextOrigin, field: str, between: str = LINE_BREAK):
        self.where = DATASET + origin.place
        self._origin = origin
        self._field = field
        self._between = between

    def size(self) -> None:
        """Return None: the size is unknown before reading."""
        return None

    def texts(self, most_bytes: int) -> Iterator[str]:
        """Yield the texts in order, with line breaks or the given separator between them.

        Raises:
            DataError: if there is no such data set, configuration, split or field, it cannot be reached, or
                a record holds no text.
        """
        try:
            groups = self._groups()
            if len(groups) == 1:
                yield from joined(until_full(groups[0], most_bytes), self._between)
            else:
                yield from joined(_shared_out(groups, most_bytes), self._between)
        except DataError:
            raise
        except Exception as error:
            # The library and its dependencies have many unrelated exceptions.
            raise DataError(
                f"the data set cannot be read: {short(error)}",
                where=self.where,
                hint=f"check the name, the configuration and the split: {DATASET}NAME[:CONFIG[:SPLIT]]",
            ) from error

    def _groups(self) -> list[Iterator[str]]:
        stream = self._stream()
        names = stream.column_names
        if names is not None and self._field not in names:
            raise missing_field(self._field, list(names), where=self.where, record_name="the data set")
        if names is not None:
            stream = stream.select_columns([self._field])
        count = min(stream.num_shards, _MOST_GROUPS)
        parts = [stream.shard(count, index, contiguous=True) for index in range(count)]
        return [self._documents(part, index) for index, part in enumerate(parts)]

    def _stream(self) -> Any:
        datasets = library(
            "datasets", "data", "datasets is needed to read this text, but it", where=self.where
        )
        datasets.disable_progress_bars()
        folder = Path(self._origin.place).expanduser()
        if not folder.is_dir():
            self._reach_hub()
            return datasets.load_dataset(
                self._origin.place, self._origin.config, split=self._origin.split, streaming=True
            )
        if any((folder / name).is_file() for name in _SAVED):
            saved = datasets.load_from_disk(str(folder))
            return (saved[self._origin.split] if isinstance(saved, dict) else saved).to_iterable_dataset()
        return datasets.load_dataset(
            str(folder), self._origin.config, split=self._origin.split, streaming=True
        )

    def _reach_hub(self) -> None:
        """Check first that the hub can be reached, because downloads retry for half a minute.

        Raises:
            DataError: if the hub does not have the data set, or cannot be reached.
        """
        try:
            HfApi().dataset_info(self._origin.place, timeout=_HUB_SECONDS)
        except (RepositoryNotFoundError, HFValidationError) as error:
            raise DataError(
                "this is not a local folder, and the hub has no data set of that name that you may read",
                where=self.where,
                hint="check the spelling",
            ) from error
        except Exception as error:
            # Proxies, DNS, time-outs, HF_HUB_OFFLINE: each client version has its own exceptions for them.
            raise DataError(
                f"this is not a local folder, and the hub cannot be reached ({type(error).__name__})",
                where=self.where,
                hint=f"check the network, or download the data set and name its folder: {DATASET}FOLDER",
            ) from error

    def _documents(self, records: Any, group: int) -> Iterator[str]:
        of_group = f" of part {group + 1}" if group else ""
        for number, record in enumerate(records, start=1):
            name = f"record {number}{of_group}"
            yield text_of(record, self._field, where=self.where, record_name=name)


def _shared_out(groups: list[Iterator[str]], most_bytes: int) -> list[str]:
    """Return the documents of all groups within `most_bytes`, by rule 2."""
    taken: list[list[str]] = [[] for _ in groups]
    left = most_bytes
    for share in (max(1, most_bytes // len(groups)), None):
        for documents, group in zip(taken, groups, strict=True):
            if left <= 0:
                break
            for document in until_full(group, left if share is None else min(left, share)):
                documents.append(document)
                left -= len(document.encode())
    return [document for documents in taken for document in documents]
