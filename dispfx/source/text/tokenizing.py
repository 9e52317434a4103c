"""Text → token ids, in bounded memory.

1. A text of at most 4 Mi characters is tokenised at once: piecewise tokenisation gives slightly different
   tokens, which would change perplexity.
2. A longer text is cut into pieces of at most 512 Ki characters after line breaks (otherwise before spaces,
   otherwise anywhere), which are tokenised eight at a time.
3. No special token is added.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.source.text.token_file import TOKENS

# A tokenizer needs about 300 bytes per token while it works: 0.4 GB for an English text of this length.
_WHOLE_CHARACTERS = 4 * 2**20
_PIECE_CHARACTERS = 512 * 2**10
_PIECES_AT_ONCE = _WHOLE_CHARACTERS // _PIECE_CHARACTERS


def encode(text: str, tokenizer: Any | None, *, where: str | None = None) -> Tensor:
    """Return the token ids of a text, shape (N,), int64, without special tokens.

    Args:
        where: the file of the text, for the message.

    Raises:
        DataError: if there is no tokenizer, or it finds no token.
    """
    return encode_stream([text], tokenizer, where=where).to(torch.int64)


def encode_stream(texts: Iterable[str], tokenizer: Any | None, *, where: str | None = None) -> Tensor:
    """Return the token ids of the concatenation of `texts`, shape (N,), int32, as `encode`.

    Raises:
        DataError: as for `encode`.
    """
    if tokenizer is None:
        raise DataError(
            "a tokenizer is needed to read text, but this model has none",
            where=where,
            hint=f"name one with --tokenizer, or pass a .safetensors file with an integer vector '{TOKENS}'",
        )
    cut = pieces(texts)
    found = []
    while batch := list(islice(cut, _PIECES_AT_ONCE)):
        # verbose=False: a text longer than the context is the usual case here, not worth a warning.
        lists = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        found += [torch.tensor(ids, dtype=torch.int32) for ids in lists]
    tokens = torch.cat(found) if found else torch.zeros(0, dtype=torch.int32)
    if not len(tokens):
        raise DataError("the tokenizer finds no token in the text", where=where)
    return tokens


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the pieces that are tokenised separately, by rules 1 and 2."""
    stream = iter(texts)
    held, characters = [], 0
    for text in stream:
        held.append(text)
        characters += len(text)
        if characters > _WHOLE_CHARACTERS:
            break
    beginning = "".join(held)
    if characters <= _WHOLE_CHARACTERS:
        if beginning:
            yield beginning
        return
    rest = ""
    for text in chain([beginning], stream):
        rest += text
        start = 0
        while len(rest) - start > _PIECE_CHARACTERS:
            stop = _cut(rest, start)
            yield rest[start:stop]
            start = stop
        rest = rest[start:]
    if rest:
        yield rest


def _cut(text: str, start: int) -> int:
    """Return the end of the piece that begins at `start`."""
    stop = start + _PIECE_CHARACTERS
    line_break = text.rfind("\n", start, stop)
    if line_break >= 0:
        return line_break + 1
    # Most tokenizers put a space and the word after it into one token.
    space = text.rfind(" ", start + 1, stop + 1)
    return space if space >= 0 else stop
