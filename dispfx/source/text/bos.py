"""The tokens at the start of every text: the beginning-of-sequence token, if the tokenizer adds one.

1. `auto` does what the tokenizer does: the tokens that it adds in front, possibly none or several, are found
   by encoding a text with and without special tokens.  Given token ids are left as they are.
   2. `on` adds the same tokens, or the beginning-of-sequence token if the tokenizer adds nothing.
3. `off` adds nothing.
"""

from typing import Any

from dispfx.errors import DataError
from dispfx.words.text_origin import Bos

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
            "--bos on takes the token from a tokenizer, but this decoder has none",
            hint="name one with --tokenizer, or leave out --bos on",
        )
    front = tokens_in_front(tokenizer)
    if front or choice == "auto":
        return front
    token = getattr(tokenizer, "bos_token_id", None)
    if not isinstance(token, int):
        raise DataError(
            "--bos on needs a beginning-of-sequence token, but the tokenizer has no bos_token",
            where=type(tokenizer).__name__,
            hint="leave out --bos on: the decoder was trained without such a token",
        )
    return (token,)


def with_bos(ids: list[int], bos: tuple[int, ...]) -> list[int]:
    """Return token ids that begin with the tokens; they are not added twice."""
    return ids if tuple(ids[: len(bos)]) == bos else [*bos, *ids]
