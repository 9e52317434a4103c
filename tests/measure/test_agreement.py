"""How alike two decoders predict."""

import math

import pytest
import torch

from dispfx.errors import DataError
from dispfx.quality.agreement import Agreement, compare_on_text
from dispfx.quality.perplexity import TextFacts, perplexity


def table(*rows: list[float]):
    """Return a decoder whose prediction hangs on the last token alone."""
    probabilities = torch.tensor(rows)
    return lambda ids_BT: probabilities.log()[ids_BT]


P = table([0.5, 0.5], [0.9, 0.1])
Q = table([0.25, 0.75], [0.9, 0.1])


def agreement(dense, pruned, ids, *, context: int, windows: int | None = None, bos=()) -> Agreement:
    text = TextFacts(bos=bos)
    return compare_on_text(dense, pruned, ids, context=context, windows=windows, text=text).agreement


def test_a_decoder_agrees_with_itself():
    found = agreement(P, P, torch.tensor([0, 1, 1, 0, 1]), context=5)
    assert found.kl_nats == pytest.approx(0.0, abs=1e-9) and found.top1 == 1.0 and found.tokens == 4


def test_the_divergence_is_that_by_hand_over_positions_that_predict():
    # windows (0, 1, 0) and (0, 1): the positions that predict are 0, 1 and 0
    found = agreement(P, Q, torch.tensor([0, 1, 0, 0, 1]), context=3)
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.tokens == 3
    assert found.kl_nats == pytest.approx(2 / 3 * by_hand, rel=1e-6)


def test_the_direction_is_from_dense_to_pruned():
    ids = torch.tensor([0, 0])
    assert agreement(P, Q, ids, context=2).kl_nats != pytest.approx(agreement(Q, P, ids, context=2).kl_nats)


def test_the_likeliest_token_is_compared():
    other = table([0.1, 0.9], [0.9, 0.1])
    first = table([0.9, 0.1], [0.9, 0.1])
    assert agreement(first, other, torch.tensor([0, 1, 1, 1, 0]), context=5).top1 == 0.75


def test_windows_limit_and_refusals():
    ids = torch.tensor([0, 1, 0, 1, 0, 1])
    assert agreement(P, Q, ids, context=2, windows=1).tokens == 1
    with pytest.raises(DataError, match="2 or more are needed"):
        agreement(P, Q, torch.tensor([0]), context=2)
    with pytest.raises(DataError, match="vocabularies of 2 and 3"):
        agreement(P, table([0.2, 0.4, 0.4], [0.2, 0.4, 0.4]), ids, context=2)


def test_with_a_bos_every_token_of_the_text_counts_once():
    ids = torch.tensor([0, 1, 0, 1, 1])
    found = agreement(P, Q, ids, context=3, bos=(1,))
    assert found.tokens == 5
    # Q differs from P after a 0, which two of the positions (1 0, 1 0, and 1 alone) are.
    alone = agreement(P, Q, torch.tensor([0, 1]), context=2).kl_nats
    assert found.kl_nats == pytest.approx(2 / 5 * alone, rel=1e-6)


@pytest.mark.parametrize("bos", [(), (1,)])
def test_perplexities_of_one_pass_are_those_of_each_decoder_alone(bos: tuple[int, ...]):
    ids, text = torch.tensor([0, 1, 0, 1, 1, 0, 0, 1]), TextFacts("some", 0.1, bos)
    found = compare_on_text(P, Q, ids, context=3, text=text)
    for decoder, value in ((P, found.dense), (Q, found.pruned)):
        assert value == perplexity(decoder, ids, context=3, text=text)
