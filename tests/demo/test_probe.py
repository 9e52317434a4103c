"""The skill probe, on decoders whose answers are known, and with a tokenizer of one id a character."""

import pytest
import torch
from torch import Tensor, nn

from dispfx.demo.grammar import SKILLS, draw_lines
from dispfx.demo.probe import NO_ANSWER, encode_lines, skill_probe
from dispfx.errors import DataError

CHARACTERS = 128


class Characters:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return list(text.encode("ascii"))


class NoTokens:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


def knows_what_comes_next(ids_BT: Tensor) -> Tensor:
    """Logits that always prefer the id that follows, so every answer is right."""
    following_BT = torch.roll(ids_BT, -1, dims=1)
    return nn.functional.one_hot(following_BT, CHARACTERS).float()


def always_says_space(ids_BT: Tensor) -> Tensor:
    logits_BTV = torch.zeros(*ids_BT.shape, CHARACTERS)
    logits_BTV[..., ord(" ")] = 1.0
    return logits_BTV


def errs_in_last_character(ids_BT: Tensor) -> Tensor:
    """Right everywhere but in the last place of each line."""
    logits_BTV = knows_what_comes_next(ids_BT)
    for row, ids_T in enumerate(ids_BT):
        last = int(ids_T.nonzero().max())
        logits_BTV[row, last - 1] = 0.0
    return logits_BTV


def test_a_decoder_that_knows_every_answer_scores_one_in_every_skill():
    assert skill_probe(knows_what_comes_next, Characters(), 0, 70) == dict.fromkeys(SKILLS, 1.0)


def test_a_decoder_that_knows_nothing_scores_zero():
    assert skill_probe(always_says_space, Characters(), 0, 70) == dict.fromkeys(SKILLS, 0.0)


def test_one_wrong_token_makes_the_whole_answer_wrong():
    assert skill_probe(errs_in_last_character, Characters(), 0, 10) == dict.fromkeys(SKILLS, 0.0)


def test_the_share_counts_right_lines_over_several_passes():
    def knows_only_even_lengths(ids_BT: Tensor) -> Tensor:
        known_B = (ids_BT != 0).sum(dim=1) % 2 == 0
        return knows_what_comes_next(ids_BT) * known_B[:, None, None]

    told = skill_probe(knows_only_even_lengths, Characters(), 3, 150)
    for skill in SKILLS:
        even = [line for line in draw_lines(skill, 3, 150) if len(line.prompt + line.answer) % 2 == 0]
        assert told[skill] == len(even) / 150


def test_outputs_with_logits_are_understood_and_modules_get_ids_on_their_device():
    class Output:
        def __init__(self, logits: Tensor):
            self.logits = logits

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, ids_BT: Tensor) -> Output:
            assert ids_BT.device == self.scale.device and ids_BT.dtype == torch.int64
            logits_BTV = knows_what_comes_next(ids_BT) * self.scale
            assert not logits_BTV.requires_grad
            return Output(logits_BTV)

    assert skill_probe(Decoder(), Characters(), 0, 3)["copy"] == 1.0


def test_lines_are_padded_on_the_right_and_only_answers_are_scored():
    lines = draw_lines("copy", 0, 5)
    ids_BT, answers_BT = encode_lines(Characters(), lines)
    for line, ids_T, answers_T in zip(lines, ids_BT, answers_BT, strict=True):
        length = len(line.prompt + line.answer)
        assert bytes(ids_T[:length].tolist()).decode() == line.prompt + line.answer
        assert not ids_T[length:].any()
        assert bytes(answers_T[answers_T != NO_ANSWER].tolist()).decode() == line.answer
        assert (answers_T[: len(line.prompt)] == NO_ANSWER).all()


def test_the_probe_refuses_no_lines_and_a_tokenizer_without_tokens():
    with pytest.raises(DataError, match="at least 1 line"):
        skill_probe(knows_what_comes_next, Characters(), 0, 0)
    with pytest.raises(DataError, match="no tokens"):
        skill_probe(knows_what_comes_next, NoTokens(), 0, 1)
