"""Each text to measure on counts by itself, and one of another kind is always among them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispfx.quality.second_text import NAME, second_text
from dispfx.run.run_text import TextChoice, open_text
from dispfx.settings import TextSettings


class Letters:
    """A tokenizer with a token for each of some letters, and one for all others."""

    unk_token_id, eos_token_id, bos_token_id, is_fast = 0, None, None, False

    def __init__(self, known: str):
        self.known = known

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[self.known.find(letter) + 1 for letter in text] for text in texts]}

    def decode(self, ids: list[int]) -> str:
        return "".join(self.known[i - 1] for i in ids)


def source_with(known: str) -> Any:
    return SimpleNamespace(tokenizer=Letters(known), config=None, name="a decoder", origin="folder")


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("learn.txt", "one.txt", "two.txt")]
    for path, letter in zip(found, "abc", strict=True):
        path.write_text(letter * 100)
    return found


def opened(source: Any, **chosen: Any):
    return open_text(source, TextChoice(TextSettings(**chosen)))


def test_the_second_text_is_measured_after_the_held_out_end(texts: list[Path]):
    text = opened(source_with("".join(sorted(set(second_text())))), data=[texts[0]])
    first, second = text.measured
    assert len(first.tokens) == 10 and first.about.held_out_share == 0.1
    assert second.about.name == NAME and len(second.tokens) == len(second_text())


def test_a_tokenizer_that_does_not_know_it_leaves_it_out(texts: list[Path]):
    assert len(opened(source_with("abc"), data=[texts[0]]).measured) == 1


def test_two_texts_of_the_user_are_measured_apart_and_take_its_place(texts: list[Path]):
    text = opened(source_with("abc"), data=[texts[0]], eval_data=texts[1:])
    assert [one.about.name for one in text.measured] == ["one.txt", "two.txt"]
    for one, token in zip(text.measured, (2, 3), strict=True):
        assert torch.equal(torch.as_tensor(one.tokens), torch.full((100,), token))
    assert len(text.learn[0]) == 100


def test_a_decoder_that_gets_ids_has_no_second_text():
    source = SimpleNamespace(tokenizer=None, config=None, name="a decoder", origin="folder")
    assert len(opened(source, data=torch.arange(100)).measured) == 1
