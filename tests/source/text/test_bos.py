"""What stands in front of every sequence is what the tokenizer puts in front of a text."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from dispfx.errors import DataError
from dispfx.source.text import bos_tokens, tokens_in_front, with_bos
from tests.source.byte_tokenizer import byte_tokenizer


def framing(template: str, *special: str) -> Any:
    """A tokenizer of bytes whose special tokens, ids from 256 on, stand where a template says."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(special), special_tokens=True)
    ids = list(zip(special, range(256, 256 + len(special)), strict=True))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_tokenizer(), ()),
        (byte_tokenizer(bos=True), (256,)),
        (framing("[mask] <s> $A", "[mask]", "<s>"), (256, 257)),
        (framing("[CLS] $A [SEP]", "[CLS]", "[SEP]"), (256,)),
        (framing("$A </s>", "</s>"), ()),
    ],
    ids=["none", "one", "two", "around", "behind"],
)
def test_what_a_tokenizer_puts_in_front_is_found_by_encoding(tokenizer: Any, expected: tuple[int, ...]):
    assert tokens_in_front(tokenizer) == bos_tokens("auto", tokenizer) == expected
    assert bos_tokens("off", tokenizer) == ()
    # Ids were made by somebody else, who chose what they begin with.
    assert bos_tokens("auto", tokenizer, given_ids=True) == ()
    if expected:
        assert bos_tokens("on", tokenizer) == bos_tokens("on", tokenizer, given_ids=True) == expected


def test_on_takes_the_token_of_a_tokenizer_that_adds_none():
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match="the tokenizer has no bos_token") as refusal:
        bos_tokens("on", tokenizer)
    assert refusal.value.exit_code == 2
    tokenizer.bos_token = "a"
    assert bos_tokens("auto", tokenizer) == ()
    assert bos_tokens("on", tokenizer) == (tokenizer.convert_tokens_to_ids("a"),)


def test_without_a_tokenizer_there_is_none_to_add():
    assert bos_tokens("auto", None) == bos_tokens("off", None) == ()
    with pytest.raises(DataError, match="takes the token from a tokenizer"):
        bos_tokens("on", None)


def test_a_prompt_that_begins_so_gets_no_second():
    assert with_bos([5, 6], (1,)) == with_bos([1, 5, 6], (1,)) == [1, 5, 6]
    assert with_bos([1, 5], (1, 2)) == [1, 2, 1, 5]
    assert with_bos([5], ()) == [5]
