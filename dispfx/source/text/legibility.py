"""Detect data that is not text, and text that the tokenizer does not know.

1. Control characters such as NUL, and U+FFFD, the replacement of undecodable bytes, indicate another
   encoding, or data that is not text.
2. A tokenizer maps unknown text to a special token, or drops it; one with byte fallback does neither.
   Dropped text is searched for in the beginning of the text.
3. A file of plain text whose first lines are all JSON objects is JSON lines under another name.

More than WARNED of the first two gives a warning; more than REFUSED is rejected unless the user allows it.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.files.json_text import parse_json
from dispfx.words.option_names import option

WARNED, REFUSED = 0.05, 0.5
# Every second byte of English in UTF-16 is NUL: about half.
REFUSED_CHARACTERS = 0.3
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_NUMBERS = re.compile(r"[\d\s,\[\]]+")
_SAMPLE_CHARACTERS = 2**16
_FIRST_LINES = 8
# How a record begins that is longer than the sample.
_RECORD_BEGINS = re.compile(r'\s*\{\s*"([^"\\]|\\.)*"\s*:')


class Beginning:
    """The beginning of a text while it is read, and the number of characters that are not text."""

    def __init__(self) -> None:
        self.sample = ""
        self._characters = 0
        self._no_text = 0

    def watch(self, texts: Iterator[str]) -> Iterator[str]:
        """Pass the text through, and inspect it."""
        for text in texts:
            if len(self.sample) < _SAMPLE_CHARACTERS:
                self.sample += text[: _SAMPLE_CHARACTERS - len(self.sample)]
            self._characters += len(text)
            self._no_text += len(_NO_TEXT.findall(text))
            yield text

    def notes(self, where: str, allow: bool) -> list[str]:
        """Return warnings for a text that was read to its end.

        Raises:
            DataError: if too much of it is not text, unless that is allowed.
        """
        share = self._no_text / max(1, self._characters)
        found = f"{share:.0%} of the characters are not text (NUL, control or replacement characters)"
        if share > REFUSED_CHARACTERS and not allow:
            raise DataError(
                found, where=where,
                hint=f"convert the file to UTF-8, or use {option('allow_unknown', True)} to read it as it is",
            )  # fmt: skip
        notes = [f"{where}: {found}"] if share > WARNED else []
        if len(self.sample) > 1 and _NUMBERS.fullmatch(self.sample):
            notes.append(f"{where}: numbers are read as text; token ids belong in a .safetensors file")
        return notes

    def notes_on_records(self, where: str, allow: bool) -> list[str]:
        """As `notes`, for a file of plain text: its first lines must not all be JSON objects (rule 3)."""
        if not _are_records(self.sample):
            return []
        found = "a text file was expected, and its first lines are JSON objects"
        if not allow:
            raise DataError(
                found, where=where,
                hint=f"name the file .jsonl, or use {option('allow_unknown', True)} to read it as it is",
            )  # fmt: skip
        return [f"{where}: {found}"]


def unknown_share(tokens: Tensor, sample: str, tokenizer: Any) -> float | None:
    """Return the share of a text that the tokenizer does not know, or None if that cannot be determined.

    Args:
        tokens: (N,) ids of the text, N at least 1.
        sample: the text's beginning.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Tokenizers without unknown text name another special token here.
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos")]
    if isinstance(unknown, int) and unknown not in others:
        return int(torch.count_nonzero(tokens == unknown)) / len(tokens)
    return _dropped_share(sample, tokenizer) if getattr(tokenizer, "is_fast", False) else None


def judged(share: float | None, where: str, allow: bool) -> list[str]:
    """Return a warning if the tokenizer does not know a large part of a text.

    Raises:
        DataError: if it is more than half, unless that is allowed.
    """
    if share is None or share <= WARNED:
        return []
    found = f"the tokenizer does not know {share:.0%} of the text"
    if share > REFUSED and not allow:
        raise DataError(
            found,
            where=where,
            hint=f"use a text that the decoder was made for, or {option('allow_unknown', True)}",
        )
    return [f"{where}: {found}"]


def _are_records(sample: str) -> bool:
    """Whether the first lines of a text's beginning are JSON objects, each a line."""
    lines = sample.split("\n")
    if len(sample) == _SAMPLE_CHARACTERS:  # which may end within a line
        if len(lines) == 1:
            return _RECORD_BEGINS.match(sample) is not None
        lines.pop()
    first = [line for line in lines if line.strip()][:_FIRST_LINES]
    try:
        return bool(first) and all(isinstance(parse_json(line), dict) for line in first)
    except ValueError:
        return False


def _dropped_share(sample: str, tokenizer: Any) -> float:
    """Return the share of non-space characters that are not in any token."""
    found = tokenizer([sample], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    covered = bytearray(len(sample))
    for start, stop in found["offset_mapping"][0]:
        covered[start:stop] = b"\1" * (stop - start)
    places = [place for place, letter in enumerate(sample) if not letter.isspace()]
    return sum(not covered[place] for place in places) / max(1, len(places))
