"""The tokens at the start of every text: the beginning-of-sequence token, where the tokenizer adds one.

1. `auto` does what the tokenizer does with a text of its own: what it puts in front, none or several tokens,
   is found by encoding a text with and without special tokens.  Ids that somebody else made are left as they
   are.
2. `on` takes the same, or where the tokenizer adds nothing, its beginning-of-sequence token.
3. `off` adds nothing.
"""

from typing import Any

from dispfx.errors import DataError
from dispfx.words.option_names import option
from dispfx.words.text_origin import Bos

# A tokenizer of one alphabet may find no token in a text of another.
_PROBES = ("text", "0", "漢", " ")


def tokens_in_front(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts in front of a text."""
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
        DataError: if there shall be such a token and the tokenizer has none.
    """
    if choice == "off" or (choice == "auto" and (given_ids or tokenizer is None)):
        return ()
    if tokenizer is None:
        raise DataError(
            f"{option('bos', 'on')} takes the token from a tokenizer, and this decoder has none",
            hint=f"name one with {option('tokenizer')}, or leave out {option('bos', 'on')}",
        )
    front = tokens_in_front(tokenizer)
    if front or choice == "auto":
        return front
    token = getattr(tokenizer, "bos_token_id", None)
    if not isinstance(token, int):
        raise DataError(
            f"{option('bos', 'on')} needs a beginning-of-sequence token, and the tokenizer has no bos_token",
            where=type(tokenizer).__name__,
            hint=f"leave out {option('bos', 'on')}: the decoder was trained without such a token",
        )
    return (token,)


def with_bos(ids: list[int], bos: tuple[int, ...]) -> list[int]:
    """Return token ids that begin with the tokens, once where they do so already."""
    return ids if tuple(ids[: len(bos)]) == bos else [*bos, *ids]
