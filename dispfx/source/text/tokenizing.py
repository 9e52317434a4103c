"""Text → token ids, in bounded memory.

1. A text of at most 4 Mi characters is tokenised at once: piecewise tokenisation gives slightly different
   tokens, which would change perplexity.
2. A longer text is cut into pieces of at most 512 Ki characters after line breaks (otherwise before spaces,
   otherwise anywhere), which are tokenised eight at a time.
3. No special token is added.

Every text may begin with tokens of its own, such as the beginning-of-sequence token:

1. `auto` does what the tokenizer does: the tokens that it adds in front, possibly none or several, are found
   by encoding a text with and without special tokens.  Given token ids are left as they are.
2. `on` adds the same tokens, or the beginning-of-sequence token if the tokenizer adds nothing.
3. `off` adds nothing.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.source.text.token_file import TOKENS
from dispfx.words.option_names import option
from dispfx.words.text_origin import Bos

# A tokenizer needs about 300 bytes per token while it works: 0.4 GB for an English text of this length.
_WHOLE_CHARACTERS = 4 * 2**20
_PIECE_CHARACTERS = 512 * 2**10
_PIECES_AT_ONCE = _WHOLE_CHARACTERS // _PIECE_CHARACTERS


def encode(text: str, tokenizer: Any | None) -> Tensor:
    """Return the token ids of a text, shape (N,), int64, without special tokens.

    Raises:
        DataError: if there is no tokenizer, or it finds no token.
    """
    return encode_stream([text], tokenizer).to(torch.int64)


def encode_stream(texts: Iterable[str], tokenizer: Any | None, *, where: str | None = None) -> Tensor:
    """Return the token ids of the concatenation of `texts`, shape (N,), int32, as `encode`.

    Args:
        where: the file of the texts, for the message.

    Raises:
        DataError: as for `encode`.
    """
    if tokenizer is None:
        raise DataError(
            "a tokenizer is needed to read text, but this model has none",
            where=where,
            hint=f"name one with {option('tokenizer')}, "
            f"or pass a .safetensors file with an integer vector '{TOKENS}'",
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


# A tokenizer for one alphabet may find no token in a text of another.
_PROBES = ("text", "0", "漢", " ")


def tokens_in_front(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer adds in front of a text."""
    for probe in _PROBES:
        plain, whole = (
            list(tokenizer([probe], add_special_tokens=special, verbose=False)["input_ids"][0])
            for special in (False, True)
        )
        places = range(len(whole) - len(plain) + 1)
        found = next((place for place in places if whole[place : place + len(plain)] == plain), None)
        if plain and found is not None:
            return tuple(whole[:found])
    return ()


def bos_tokens(choice: Bos, tokenizer: Any | None, *, given_ids: bool = False) -> tuple[int, ...]:
    """Return the ids that every text begins with.

    Args:
        tokenizer: of the decoder, or None.
        given_ids: whether the text came as token ids.

    Raises:
        DataError: if `on` is requested and the tokenizer has no such token.
    """
    if choice == "off" or (choice == "auto" and (given_ids or tokenizer is None)):
        return ()
    if tokenizer is None:
        raise DataError(
            f"{option('bos', 'on')} takes the token from a tokenizer, but this decoder has none",
            hint=f"name one with {option('tokenizer')}, or leave out {option('bos', 'on')}",
        )
    front = tokens_in_front(tokenizer)
    if front or choice == "auto":
        return front
    token = getattr(tokenizer, "bos_token_id", None)
    if not isinstance(token, int):
        raise DataError(
            f"{option('bos', 'on')} needs a beginning-of-sequence token, but the tokenizer has no bos_token",
            where=type(tokenizer).__name__,
            hint=f"leave out {option('bos', 'on')}: the decoder was trained without such a token",
        )
    return (token,)


def with_bos(ids: list[int], bos: tuple[int, ...]) -> list[int]:
    """Return token ids that begin with the tokens; they are not added twice."""
    return ids if tuple(ids[: len(bos)]) == bos else [*bos, *ids]
