"""How much of a text a decoder can make sense of.

1. Characters that no text has (NUL and other control characters, and U+FFFD, which stands for what a program
   could not decode) say that a file is of another encoding, or no text.
2. A tokenizer has a token for what it does not know, or drops it; one that falls back to bytes does neither.
   What is dropped is looked for in the text's beginning.

More than WARNED of either gets a line of warning, more than REFUSED is refused unless the user allows it.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.words.option_names import option

WARNED, REFUSED = 0.05, 0.5
# Every second byte of English in UTF-16 is NUL: half, but for what is not English.
REFUSED_CHARACTERS = 0.3
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_NUMBERS = re.compile(r"[\d\s,\[\]]+")
_SAMPLE_CHARACTERS = 2**16


class Beginning:
    """The first characters of a text that others read, and how many of all characters are no text."""

    def __init__(self) -> None:
        self.sample = ""
        self._characters = 0
        self._no_text = 0

    def watch(self, texts: Iterator[str]) -> Iterator[str]:
        """Yield what is read, and look at it."""
        for text in texts:
            if len(self.sample) < _SAMPLE_CHARACTERS:
                self.sample += text[: _SAMPLE_CHARACTERS - len(self.sample)]
            self._characters += len(text)
            self._no_text += len(_NO_TEXT.findall(text))
            yield text

    def notes(self, where: str, allow: bool) -> list[str]:
        """Return lines of warning for a text that was read whole.

        Raises:
            DataError: if too much of it is no text, unless that is allowed.
        """
        share = self._no_text / max(1, self._characters)
        found = f"{share:.0%} of the characters are no text (NUL, control or replacement characters)"
        if share > REFUSED_CHARACTERS and not allow:
            raise DataError(
                found, where=where,
                hint=f"convert the file to UTF-8, or use {option('allow_unknown', True)} to read it as it is",
            )  # fmt: skip
        notes = [f"{where}: {found}"] if share > WARNED else []
        if len(self.sample) > 1 and _NUMBERS.fullmatch(self.sample):
            notes.append(f"{where}: numbers are read as text; token ids belong into a .safetensors file")
        return notes


def unknown_share(tokens: Tensor, sample: str, tokenizer: Any) -> float | None:
    """Return the share of a text that the tokenizer does not know, or None where that cannot be seen.

    Args:
        tokens: (N,) ids of the text, N at least 1.
        sample: the text's beginning.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    # Tokenizers that know everything name another special token here.
    others = [getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "bos")]
    if isinstance(unknown, int) and unknown not in others:
        return int(torch.count_nonzero(tokens == unknown)) / len(tokens)
    return _dropped_share(sample, tokenizer) if getattr(tokenizer, "is_fast", False) else None


def judged(share: float | None, where: str, allow: bool) -> list[str]:
    """Return a line of warning where the tokenizer does not know much of a text.

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


def _dropped_share(sample: str, tokenizer: Any) -> float:
    """Return the share of characters, spaces aside, that are in no token."""
    found = tokenizer([sample], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    covered = bytearray(len(sample))
    for start, stop in found["offset_mapping"][0]:
        covered[start:stop] = b"\1" * (stop - start)
    places = [place for place, letter in enumerate(sample) if not letter.isspace()]
    return sum(not covered[place] for place in places) / max(1, len(places))
