"""Texts of every form → token ids.

1. Texts are joined by line breaks and tokenised together, not line by line; a token file between them
   keeps its place.
2. Texts that exceed the limit share it: each text gets an equal part, and the unused part of a short text
   goes to longer ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any, Protocol

from torch import Tensor

from dispfx.errors import DataError
from dispfx.settings.sections import Reading
from dispfx.source.text.dataset import NamedDataset
from dispfx.source.text.json_lines import JsonLines
from dispfx.source.text.legibility import Beginning, judged, unknown_share
from dispfx.source.text.parquet import Parquet
from dispfx.source.text.plain import PlainText
from dispfx.source.text.token_file import joined_tokens, largest_id, stored_tokens
from dispfx.source.text.tokenizing import encode_stream
from dispfx.words.text_origin import LINE_BREAK, TextOrigin, text_origin

Words = str | PurePath | Sequence[str | PurePath]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class TextStream(Protocol):
    """A text that is read from its start, up to a limit."""

    @property
    def where(self) -> str:
        """Name given by the user, for messages."""
        ...

    def size(self) -> int | None:
        """Return its bytes, or None if unknown before reading."""
        ...

    def texts(self, most_bytes: int) -> Iterator[str]:
        """Yield pieces of the text in order; evenly spaced ones if it exceeds the limit."""
        ...


@dataclass(frozen=True, eq=False)
class ReadText:
    """Token ids and what they are.

    Args:
        tokens: (N,) integers; those of a token file stay on disk until they are used.
        name: of the texts, with the amount that was read if not all.
        largest: of the token ids.
        given_ids: whether some of them were given as ids instead of text.
        unknown_share: share of the text that the tokenizer does not know; None if undetermined.
        notes: warnings.
    """

    tokens: Tensor
    name: str
    largest: int
    given_ids: bool = False
    unknown_share: float | None = None
    notes: tuple[str, ...] = ()


def read_text(words: Words, tokenizer: Any | None, reading: Reading | None = None) -> ReadText:
    """Return the token ids of all texts in order, without special tokens.

    Args:
        words: files and data sets, as in `dispfx.words.text_origin`.
        tokenizer: of the decoder; token files need none.
        reading: field, limit and other options.

    Raises:
        DataError: if a text is missing, empty, not UTF-8, broken or without the field, or there is no
            tokenizer for it, or most of it is not text or unknown to the tokenizer.
    """
    return _read(_opened(words, reading), tokenizer, reading or Reading())


def read_apart(words: Words, tokenizer: Any | None, reading: Reading | None = None) -> list[ReadText]:
    """As `read_text`, but return the texts separately."""
    return [_read([one], tokenizer, reading or Reading()) for one in _opened(words, reading)]


def check_readable(words: Words, reading: Reading | None = None) -> None:
    """Read every text as `read_text` would, without a tokenizer; of a data set, only its first record.

    Call this before loading a decoder, which can take longer than reading texts.

    Raises:
        DataError: as `read_text`.
    """
    for one in _opened(words, reading):
        if one.stream is None:
            stored_tokens(one.origin.path)
        elif one.origin.form == "dataset":
            next(one.stream.texts(1), None)
        else:
            for _ in one.texts():
                pass


def listed(words: Words) -> list[str | PurePath]:
    """Return one or several given texts as a list."""
    return [words] if isinstance(words, str | PurePath) else list(words)


def text_stream(origin: TextOrigin, field: str, between: str = LINE_BREAK) -> TextStream:
    """Return the reader of a text that is not a token file."""
    if origin.form == "dataset":
        return NamedDataset(origin, field, between)
    if origin.form == "json-lines":
        return JsonLines(origin.path, field, between)
    return Parquet(origin.path, field, between) if origin.form == "parquet" else PlainText(origin.path)


def shares(sizes: Sequence[int | None], most_bytes: int) -> list[int]:
    """Return the limit of each text by rule 2; a text of unknown size may use its full part."""
    found = {}
    left = most_bytes
    by_size = sorted(enumerate(sizes), key=lambda entry: (entry[1] is None, entry[1] or 0))
    for done, (index, size) in enumerate(by_size):
        equal = max(1, left // (len(sizes) - done))
        found[index] = equal if size is None else min(size, equal)
        left -= found[index]
    return [found[index] for index in range(len(sizes))]


class _Opened:
    """A text to read.

    Args:
        origin: the text that the user named.
        stream: None for a token file.
        room: bytes that may be read.
        allow_unknown: as of `Reading`.
    """

    def __init__(self, origin: TextOrigin, stream: TextStream | None, room: int, allow_unknown: bool):
        self.origin = origin
        self.stream = stream
        self.notes: list[str] = []
        self._room = room
        self._bytes_read = 0
        self._allow_unknown = allow_unknown

    def texts(self) -> Iterator[str]:
        """Yield the text, and count its bytes.

        Raises:
            DataError: at the end, if it contained only spaces and line breaks, or was not text.
        """
        assert self.stream is not None
        blank, beginning = True, Beginning()
        for text in beginning.watch(self.stream.texts(self._room)):
            blank = blank and not text.strip()
            self._bytes_read += len(text.encode())
            yield text
        if blank:
            raise DataError("the text is empty", where=self.stream.where)
        self.notes = beginning.notes(self.stream.where, self._allow_unknown)
        if self.origin.form == "text":
            self.notes += beginning.notes_on_records(self.stream.where, self._allow_unknown)

    @property
    def name(self) -> str:
        """Name for the report, with the amount that was read if not all."""
        size = None if self.stream is None else self.stream.size()
        if self.stream is None or (size is not None and size <= self._room):
            return self.origin.name
        if size is not None:
            return f"{self.origin.name} ({_sized(self._bytes_read)} of {_sized(size)})"
        full = self._bytes_read >= self._room
        return self.origin.name + (f" (its first {_sized(self._bytes_read)})" if full else "")


def _opened(words: Words, reading: Reading | None) -> list[_Opened]:
    chosen = reading or Reading()
    origins = [text_origin(word) for word in listed(words)]
    if not origins:
        raise DataError("a text file is needed, but none was given")
    streams = [
        None if o.form == "tokens" else text_stream(o, chosen.data_field, chosen.between) for o in origins
    ]
    sizes = [0 if stream is None else stream.size() for stream in streams]
    rooms = shares(sizes, chosen.data_bytes)
    allow = chosen.allow_unknown
    return [_Opened(*of, allow) for of in zip(origins, streams, rooms, strict=True)]


def _read(opened: Sequence[_Opened], tokenizer: Any | None, reading: Reading) -> ReadText:
    parts, shares, notes = [], [], []
    for stored, group in groupby(opened, key=lambda one: one.stream is None):
        members = list(group)
        if stored:
            parts += [stored_tokens(one.origin.path) for one in members]
            continue
        where, beginning = members[0].origin.place, Beginning()
        parts.append(
            encode_stream(beginning.watch(_joined(members, reading.between)), tokenizer, where=where)
        )
        share = unknown_share(parts[-1], beginning.sample, tokenizer)
        notes += [
            *(note for one in members for note in one.notes),
            *judged(share, where, reading.allow_unknown),
        ]
        shares.append((share, len(parts[-1])))
    name = ", ".join(one.name for one in opened)
    largest = max(largest_id(part, where=name) for part in parts)
    given_ids = any(one.stream is None for one in opened)
    return ReadText(joined_tokens(parts), name, largest, given_ids, _mean(shares), tuple(notes))


def _mean(shares: Sequence[tuple[float | None, int]]) -> float | None:
    """Return the mean of the known shares, weighted by numbers of tokens."""
    known = [(share, count) for share, count in shares if share is not None]
    return sum(share * count for share, count in known) / sum(c for _, c in known) if known else None


def _joined(opened: Sequence[_Opened], between: str) -> Iterator[str]:
    for index, one in enumerate(opened):
        if index:
            yield between
        yield from one.texts()


def _sized(count: int) -> str:
    """Format a number of bytes with one to four digits before the point."""
    power = 0
    while count >= 1024 ** (power + 1) and power + 1 < len(_UNITS):
        power += 1
    return f"{count / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
