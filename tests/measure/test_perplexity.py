"""Perplexity against cases that can be worked out by hand."""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.quality import logits_by_rows
from dispfx.quality.agreement import compare_on_text
from dispfx.quality.perplexity import TextFacts, perplexity

TABLE = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.2, 0.6]], dtype=torch.float64)


def bigram(ids_BT: Tensor) -> Tensor:
    return TABLE.log()[ids_BT]


def by_hand(windows: list[list[int]]) -> float:
    logs = [math.log(float(TABLE[a, b])) for ids in windows for a, b in pairwise(ids)]
    return math.exp(-sum(logs) / len(logs))


def test_a_decoder_that_knows_nothing_has_the_vocabulary_size():
    result = perplexity(lambda ids_BT: torch.zeros(*ids_BT.shape, 37), torch.arange(30), context=8)
    assert result.value == pytest.approx(37.0, rel=1e-6)


def test_a_bigram_table_is_measured_exactly_window_by_window():
    tokens = torch.tensor([0, 1, 1, 2, 2, 0, 1, 0])
    result = perplexity(bigram, tokens, context=3, text=TextFacts("by hand", 0.1))

    # Float32 log-probabilities, hence 1e-6.
    assert result.value == pytest.approx(by_hand([[0, 1, 1], [2, 2, 0], [1, 0]]), rel=1e-6)
    assert result.protocol == {
        "text": "by hand",
        "context": 3,
        "windows": 3,
        "tokens": 5,
        "held_out_share": 0.1,
        "bos": (),
        "unknown_share": None,
    }


def test_a_single_token_at_the_end_is_no_window():
    result = perplexity(bigram, torch.tensor([0, 1, 1, 2]), context=3)
    assert result.value == pytest.approx(by_hand([[0, 1, 1]]), rel=1e-6)
    assert (result.protocol["windows"], result.protocol["tokens"]) == (1, 2)


def test_a_text_shorter_than_one_window_is_one_window():
    result = perplexity(bigram, torch.tensor([2, 0]), context=64)
    assert result.value == pytest.approx(1 / 0.2, rel=1e-6)
    assert (result.protocol["context"], result.protocol["windows"], result.protocol["tokens"]) == (2, 1, 1)


@pytest.mark.parametrize(("tokens", "bos", "longest"), [(5, (), 5), (5, (2,), 6), (9, (), 8), (9, (2, 2), 8)])
def test_the_protocol_names_the_longest_window_that_was_measured(
    tokens: int, bos: tuple[int, ...], longest: int
):
    ids, text = torch.zeros(tokens, dtype=torch.int64), TextFacts(bos=bos)
    assert perplexity(bigram, ids, context=8, text=text).protocol["context"] == longest
    both = compare_on_text(bigram, bigram, ids, context=8, text=text)
    assert both.dense.protocol["context"] == longest == both.pruned.protocol["context"]


def test_a_limit_takes_the_first_windows_and_counts_the_last_short_one():
    tokens = torch.tensor([0, 1, 1, 2, 2, 0, 1, 0])
    two = perplexity(bigram, tokens, context=3, windows=2)
    assert two.value == pytest.approx(by_hand([[0, 1, 1], [2, 2, 0]]), rel=1e-6)
    assert perplexity(bigram, tokens, context=3, windows=3) == perplexity(bigram, tokens, context=3)
    assert perplexity(bigram, tokens, context=3, windows=9).protocol["windows"] == 3


@pytest.mark.parametrize("batch_size", [2, 3, 64])
def test_the_batch_size_changes_nothing(batch_size: int):
    tokens = torch.randint(3, (50,))
    one = perplexity(bigram, tokens, context=7, batch_size=1)
    many = perplexity(bigram, tokens, context=7, batch_size=batch_size)
    assert many.protocol == one.protocol
    assert many.value == pytest.approx(one.value, rel=1e-12)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.randint(3, (50,))
    whole = perplexity(bigram, tokens, context=7)
    monkeypatch.setattr(logits_by_rows, "CHUNK_BYTES", 4 * 3 * 2)
    assert perplexity(bigram, tokens, context=7).value == pytest.approx(whole.value, rel=1e-12)


def test_an_output_with_logits_is_read():
    tokens = torch.randint(3, (20,))
    wrapped = perplexity(lambda ids_BT: SimpleNamespace(logits=bigram(ids_BT)), tokens, context=5)
    assert wrapped == perplexity(bigram, tokens, context=5)


def test_half_precision_logits_are_summed_in_full_precision():
    tokens = torch.randint(3, (2000,))
    exact = perplexity(bigram, tokens, context=100).value
    rounded = perplexity(lambda ids_BT: bigram(ids_BT).bfloat16(), tokens, context=100).value
    # Each logit is off by up to 2^-9 of itself; a sum in bfloat16 would be off by tens of percent.
    assert rounded == pytest.approx(exact, rel=1e-2)


def test_a_decoder_that_rules_out_what_comes_is_infinitely_surprised():
    certain = torch.tensor([[1e6, 0.0], [1e6, 0.0]])
    assert perplexity(lambda ids_BT: certain[ids_BT], torch.ones(9).long(), context=4).value == math.inf


def test_no_gradient_is_kept():
    weight = torch.zeros(3, requires_grad=True)
    seen: list[bool] = []

    def decoder(ids_BT: Tensor) -> Tensor:
        logits_BTV = bigram(ids_BT) + weight
        seen.append(logits_BTV.requires_grad)
        return logits_BTV

    perplexity(decoder, torch.tensor([0, 1]), context=2)
    assert seen == [False]


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([0], {"context": 4}, "2 or more are needed"),
        ([], {"context": 4}, "2 or more are needed"),
        ([0, 1, 2], {"context": 1}, "context is 1"),
        ([0, 1, 2], {"context": 2, "windows": 0}, "`eval_windows` must be at least 1, and 0 was given"),
    ],
)
def test_nothing_to_predict_is_refused(tokens: list[int], options: dict[str, Any], reason: str):
    with pytest.raises(DataError, match=reason):
        perplexity(bigram, torch.tensor(tokens, dtype=torch.int64), **options)


def test_every_window_begins_with_the_bos_which_is_not_predicted():
    tokens = torch.tensor([0, 1, 1, 2, 2], dtype=torch.uint8)
    result = perplexity(bigram, tokens, context=3, text=TextFacts(bos=(2,)))
    assert result.value == pytest.approx(by_hand([[2, 0, 1], [2, 1, 2], [2, 2]]), rel=1e-6)
    # The text is predicted whole, and a window of the token and one more counts.
    assert result.protocol["tokens"] == 5 and result.protocol["windows"] == 3
    assert result.protocol["bos"] == (2,) and result.protocol["context"] == 3
    two = perplexity(bigram, tokens, context=4, batch_size=2, text=TextFacts(bos=(0, 2)))
    assert two.value == pytest.approx(result.value, rel=1e-6)
    with pytest.raises(DataError, match="must hold 3 tokens or more"):
        perplexity(bigram, tokens, context=2, text=TextFacts(bos=(0, 2)))
