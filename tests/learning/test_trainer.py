"""Learning beats chance at the same budget, and every variant meets the budget."""

import json
from dataclasses import replace

import pytest
import torch

from dispfx.errors import BudgetError, DataError, DispfxError, PassError
from dispfx.learning.objective import next_token_loss
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Learned, Watch, learn
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import ParameterCount, hard_masks, harden
from tests.learning.tiny_decoder import (
    TinyDecoder,
    batches,
    markov_tokens,
    settings,
    task_of,
    trained_decoder,
    untrained_decoder,
)

TEXT = markov_tokens(6_000)


@pytest.fixture(scope="module")
def decoder() -> TinyDecoder:
    return trained_decoder(TEXT)


def run(decoder: TinyDecoder, budget: Budget, chosen, **options) -> Learned:
    return learn(task_of(decoder, batches(TEXT, chosen), budget, chosen), Watch(**options))


def held_out_loss(decoder: TinyDecoder, kept) -> float:
    ids_BT = torch.cat(batches(TEXT, settings()).held_out_batches(100))
    masks = hard_masks(decoder.sites, kept).split([site.size for site in decoder.sites])
    return float(next_token_loss(decoder(ids_BT, masks), ids_BT))


def test_learned_masks_beat_random_masks_of_the_same_budget(decoder):
    budget = Budget(0.5)
    found = run(decoder, budget, settings(steps=150, batch_size=16, lr=5e-3))
    assert abs(found.achieved - 0.5) <= 0.001
    count = ParameterCount.of_sites(decoder.sites, decoder.shapes)
    by_chance = []
    for seed in range(5):
        noise = torch.randn(count.features, generator=torch.Generator().manual_seed(seed))
        by_chance.append(held_out_loss(decoder, harden(noise, decoder.sites, count, budget)))
    dense = held_out_loss(decoder, [torch.arange(site.size) for site in decoder.sites])
    learned = held_out_loss(decoder, found.kept)
    # Far, not just, better: at least half of what the best of five random plans loses comes back.
    assert learned - dense < 0.5 * (min(by_chance) - dense)
    # The sampled masks reach the budget too, so it is not the hardening alone that meets it.
    assert abs(found.records[-1].achieved_ratio - 0.5) < 0.05


@pytest.mark.parametrize("estimator", ["reinmax", "gumbel", "straight-through"])
@pytest.mark.parametrize("hypernetwork", ["full", "linear", "none"])
@pytest.mark.parametrize("constrained", [False, True])
def test_every_variant_runs_and_meets_the_budget(decoder, estimator, hypernetwork, constrained):
    chosen = settings(estimator=estimator, hypernetwork=hypernetwork, constrained=constrained, steps=3)
    found = run(decoder, Budget(0.3), chosen)
    assert abs(found.achieved - 0.3) <= 0.001
    assert [record.step for record in found.records] == [1, 2, 3]
    assert found.logits.shape == (1, sum(site.size for site in decoder.sites))
    shared = [kept for site, kept in zip(decoder.sites, found.kept, strict=True) if site.kind != "inner"]
    assert all(torch.equal(shared[0], other) for other in shared) == constrained


@pytest.mark.parametrize(
    ("ratio", "of", "align"), [(0.0, "blocks", 1), (0.7, "blocks", 1), (0.2, "total", 8)]
)
def test_budgets_of_every_kind_are_met(decoder, ratio, of, align):
    found = run(decoder, Budget(ratio, of, align), settings(steps=1))
    assert abs(found.achieved - ratio) <= (0.001 if align == 1 else 0.005)
    sizes = [site.size for site in decoder.sites]
    assert all(
        len(kept) % align == 0 or len(kept) == size for kept, size in zip(found.kept, sizes, strict=True)
    )


@pytest.mark.parametrize("weight", [0.0, 1e-6, 1e6])
def test_the_budget_is_met_whatever_its_weight_in_the_loss(decoder, weight):
    found = run(decoder, Budget(0.3), settings(steps=3, lambda_=weight))
    assert abs(found.achieved - 0.3) <= 0.001


def test_the_plan_depends_on_the_seed(decoder):
    first, again, other = (run(decoder, Budget(0.4), settings(steps=2, seed=seed)).kept for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_passes_over_parts_of_a_batch_add_up_to_the_whole_batch(decoder):
    # Masks are drawn once a step, so two passes of four sequences see what one pass of eight sees.
    whole = run(decoder, Budget(0.3), settings(steps=1, batch_size=8))
    parts = run(decoder, Budget(0.3), settings(steps=1, batch_size=4, accumulate=2))
    assert parts.records[0].loss == pytest.approx(whole.records[0].loss, rel=1e-6)
    # One AdamW step moves a weight by at most the learning rate, in the direction of its gradient.
    torch.testing.assert_close(parts.logits, whole.logits, atol=1e-4, rtol=0)


def test_the_decoder_is_left_as_it_was(decoder):
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    run(decoder, Budget(0.3), settings(steps=2))
    assert all(torch.equal(before[name], tensor) for name, tensor in decoder.state_dict().items())
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_records_say_how_far_the_run_is(decoder, tmp_path):
    seen = []
    chosen = settings(steps=7, log_every=3, held_out_every=6)
    found = run(decoder, Budget(0.3), chosen, on_step=seen.append, state_dir=tmp_path)
    assert [record.step for record in seen] == [3, 6, 7]
    assert tuple(seen) == found.records
    assert seen[0].steps == 7 and seen[0].tokens_per_second > 0 and seen[-1].seconds_left == 0
    assert [record.held_out_loss is not None for record in seen] == [False, True, False]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [3, 6, 7]
    assert written[1]["held_out_loss"] == seen[1].held_out_loss
    assert (found.first_step, found.steps, found.bad_steps) == (0, 7, 0)


def test_a_ratio_beyond_the_sites_is_refused_before_the_first_step(decoder):
    seen = []
    with pytest.raises(BudgetError, match="at most"):
        run(decoder, Budget(0.95, "total"), settings(), on_step=seen.append)
    assert seen == []


def test_text_cut_otherwise_than_the_settings_say_is_refused(decoder):
    text = TokenBatches(TEXT, seq_len=8, batch_size=4)
    with pytest.raises(DataError, match=r"4 × 8 tokens, and the settings ask for 4 × 16"):
        learn(task_of(decoder, text, Budget(0.3), settings()))


def test_a_cosine_schedule_gives_another_result_than_a_constant_rate():
    decoder = untrained_decoder()
    constant = settings(steps=3)
    first = run(decoder, Budget(0.3), constant)
    second = run(decoder, Budget(0.3), replace(constant, schedule="cosine"))
    assert not torch.equal(first.logits, second.logits)


def test_logits_that_are_not_finite_choose_nothing_and_are_the_inputs_fault(decoder):
    with pytest.raises(DispfxError, match="the logits are not finite after step 3") as caught:
        run(decoder, Budget(0.3), settings(steps=3, lr=1e38))
    assert not isinstance(caught.value, PassError) and "`lr`" in str(caught.value)
