"""A text that fits is tokenised in one go; a longer one in pieces cut where words end."""

import pytest
import torch

from dispfx.source.text import tokenizing
from dispfx.source.text.tokenizing import encode_stream, pieces
from tests.source.byte_tokenizer import byte_tokenizer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of ten characters; texts of up to forty are whole."""
    monkeypatch.setattr(tokenizing, "_WHOLE_CHARACTERS", 40)
    monkeypatch.setattr(tokenizing, "_PIECE_CHARACTERS", 10)
    monkeypatch.setattr(tokenizing, "_PIECES_AT_ONCE", 2)


def test_a_text_that_fits_is_one_piece_however_it_arrives(small: None):
    assert list(pieces(["a" * 20, "", "b\n" * 10])) == ["a" * 20 + "b\n" * 10]
    assert list(pieces([])) == [] and list(pieces([""])) == []


def test_a_longer_text_is_cut_after_line_breaks_then_before_spaces_then_anywhere(small: None):
    assert list(pieces(["one\ntwo\nthree\n" * 4]))[:3] == ["one\ntwo\n", "three\none\n", "two\nthree\n"]
    assert list(pieces(["one two three four five six seven eight nine"]))[:3] == [
        "one two",
        " three",
        " four five",
    ]
    assert list(pieces(["x" * 41])) == ["x" * 10] * 4 + ["x"]
    assert next(iter(pieces([" " * 41]))) == " " * 10


@pytest.mark.parametrize("step", [1, 3, 7, 50])
def test_pieces_are_bounded_together_the_text_and_the_same_however_it_arrives(small: None, step: int):
    text = "".join(f"line {number} — of some words\n" for number in range(40))
    arriving = [text[start : start + step] for start in range(0, len(text), step)]
    found = list(pieces(arriving))
    assert "".join(found) == text
    assert max(map(len, found)) <= 10
    assert found == list(pieces([text]))


def test_tokens_of_pieces_are_joined_in_order(small: None):
    text = "some words — and others\n" * 30
    tokenizer = byte_tokenizer(bos=True)
    found = encode_stream(iter([text[:100], text[100:]]), tokenizer)
    assert tokenizer.decode(found) == text and found.dtype == torch.int32


def test_four_million_characters_are_still_one_piece():
    """Perplexity on the usual test texts is that of the text tokenised whole."""
    text = "a" * (4 * 2**20)
    assert [len(piece) for piece in pieces([text])] == [len(text)]
    assert max(len(piece) for piece in pieces([text, "a"])) == 512 * 2**10
