"""Plans from masks and scores of one's own, and what is refused in them."""

from typing import Any

import numpy as np
import pytest
import torch

import dispfx
from dispfx.errors import BudgetError, PlanMismatchError
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.plan import Plan
from dispfx.plan.plan_making import checked_indices, layer_of
from tests.programs import program_of, relative_error, token_ids

INNER = "layers.0.mlp.inner"


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of("fused-gate-up")


def full(program: Program) -> dict[str, Any]:
    return {site.name: torch.ones(site.size, dtype=torch.bool) for site in program.sites}


def scores_of(program: Program) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {site.name: torch.randn(site.size, generator=generator) for site in program.sites}


def removed(program: Program, plan: Plan, branches: str) -> float:
    """Return the share of the weights of some branches that a plan removes."""
    sites = [site for site in program.sites if site.branch.startswith(branches)]
    masks = torch.cat(
        [torch.zeros(site.size).index_fill(0, plan.kept[site.name].long(), 1.0) for site in sites]
    )
    count = ParameterCount.of_sites(sites, program.shapes)
    return 1.0 - count.count_kept(masks) / count.dense


def test_boolean_masks_and_indices_of_every_kind_of_array_give_the_same_plan(program: Program):
    mask = torch.arange(48) % 3 == 0
    forms = [mask, mask.numpy(), mask.tolist(), mask.nonzero().flatten(), np.arange(0, 48, 3)]
    forms += [list(range(45, -1, -3)), mask.nonzero().flatten().to(torch.uint8).flip(0)]
    plans = [Plan.from_masks(program, full(program) | {INNER: form}) for form in forms]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].kept[INNER].tolist() == list(range(0, 48, 3))
    assert plans[0].budget.ratio == plans[0].achieved > 0.0
    ids = token_ids(2, 7)
    gated, lowered = dispfx.gated(program, plans[0]), dispfx.lower(program, plans[0])
    assert relative_error(lowered(ids), gated(ids)) < 2e-6


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(47, dtype=torch.bool), r"a boolean mask has shape \(48,\), found \(47,\)"),
        (torch.ones(1, 48, dtype=torch.bool), r"a boolean mask has shape \(48,\), found \(1, 48\)"),
        (torch.zeros(48, dtype=torch.bool), "this mask keeps none"),
        ([], "this mask keeps none"),
        (torch.tensor(3), r"indices have shape \(K,\), found \(\)"),
        ([0, 1, 1], "indices are distinct, found 1 more than once"),
        (torch.ones(48, dtype=torch.int64), r"pass mask.bool\(\) for a mask of zeros and ones"),
        ([0, 48], r"indices lie in \[0, 48\), found 48"),
        ([-1, 4], r"indices lie in \[0, 48\), found -1"),
        (torch.ones(48), "a mask is boolean or holds indices, found float32"),
        ("all of them", "the mask is not an array of numbers"),
        ([[0, 1], [2]], "the mask is not an array of numbers"),
    ],
)
def test_a_mask_that_does_not_fit_its_site_is_refused(program: Program, mask: Any, message: str):
    with pytest.raises(PlanMismatchError, match=message) as refused:
        Plan.from_masks(program, full(program) | {INNER: mask})
    assert refused.value.where == INNER


def test_sites_without_a_mask_and_masks_without_a_site_are_refused(program: Program):
    masks = full(program)
    with pytest.raises(PlanMismatchError, match=r"did you mean layers\.0\.mlp\.inner"):
        Plan.from_masks(program, masks | {"layers.0.mlp.iner": masks[INNER]})
    del masks[INNER]
    with pytest.raises(PlanMismatchError, match="every site needs a mask, but 1 of 10 have none"):
        Plan.from_masks(program, masks)


def test_experts_that_keep_unequal_numbers_are_refused():
    site = Site("experts.inner", "experts", "mlp", "inner", 8, (), experts=2)
    assert checked_indices(site, torch.tensor([5, 0])).tolist() == [0, 5]
    with pytest.raises(PlanMismatchError, match=r"every expert keeps equally many features, found \[2, 1\]"):
        checked_indices(site, torch.tensor([0, 1, 5]))


def test_a_plan_of_tensors_takes_a_boolean_mask_for_what_it_is(program: Program):
    masks = [torch.arange(site.size) % 2 == 0 for site in program.sites]
    plan = Plan.of(program, Budget(0.0), masks, seed=0)
    assert plan.kept[INNER].tolist() == list(range(0, 48, 2))
    with pytest.raises(PlanMismatchError, match="float32"):
        Plan.of(program, Budget(0.0), [mask.float() for mask in masks], seed=0)


def test_scores_keep_the_best_features_within_the_ratio(program: Program):
    scores = scores_of(program)
    plan = Plan.from_scores(program, scores, 0.3)
    assert plan.budget.ratio == pytest.approx(0.3) and abs(plan.achieved - 0.3) < 0.005
    for name, kept in plan.kept.items():
        lost = torch.ones(len(scores[name]), dtype=torch.bool).index_fill(0, kept.long(), False)
        assert not lost.any() or scores[name][kept.long()].min() >= scores[name][lost].max()
    arrays = {name: values.numpy() for name, values in scores.items()}
    assert Plan.from_scores(program, arrays, 0.3) == plan
    aligned = Plan.from_scores(program, scores, 0.3, align=8)
    assert all(len(kept) % 8 == 0 for kept in aligned.kept.values())


def test_every_layer_meets_the_ratio_alone(program: Program):
    scores = scores_of(program)
    for name in scores:
        scores[name] += 5.0 * name.startswith("layers.1")  # together, nearly all would come from layer 0
    together = Plan.from_scores(program, scores, 0.3)
    alone = Plan.from_scores(program, scores, 0.3, per_layer=True)
    assert removed(program, together, "layers.0") > 0.5
    for layer in ("layers.0", "layers.1"):
        assert removed(program, alone, layer) == pytest.approx(0.3, abs=0.005)


def test_ratios_by_pattern_hold_for_their_branches(program: Program):
    plan = Plan.from_scores(program, scores_of(program), {"layers.0.*": 0.1, "*.mlp": 0.5, "*": 0.2})
    assert removed(program, plan, "layers.0") == pytest.approx(0.1, abs=0.005)
    assert removed(program, plan, "layers.1.mlp") == pytest.approx(0.5, abs=0.005)
    assert removed(program, plan, "layers.1.attention") == pytest.approx(0.2, abs=0.005)
    assert plan.achieved == pytest.approx(plan.budget.ratio, abs=0.005)


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (30, "0.3 is 30%"),
        (1.0, "between 0 and 1"),
        ("0.3", "between 0 and 1"),
        ({"layers.0.*": 0.3}, "no pattern of ratio fits this branch"),
        ({"*": 0.3, "layers.0.*": 0.1}, "no branch is left for the pattern 'layers.0"),
        ({"*.mlp": 30, "*": 0.1}, "0.3 is 30%"),
    ],
)
def test_ratios_that_make_no_sense_are_refused(program: Program, ratio: Any, message: str):
    with pytest.raises(BudgetError, match=message):
        Plan.from_scores(program, scores_of(program), ratio)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (torch.zeros(47), r"scores have shape \(48,\), found \(47,\)"),
        (torch.full((48,), float("nan")), "scores must be finite"),
        (torch.ones(48, dtype=torch.bool), "scores are real numbers, found bool"),
    ],
)
def test_scores_that_do_not_fit_are_refused(program: Program, scores: Any, message: str):
    with pytest.raises(PlanMismatchError, match=message):
        Plan.from_scores(program, scores_of(program) | {INNER: scores}, 0.3)


def test_ratios_per_layer_count_no_weights_outside_of_layers(program: Program):
    with pytest.raises(BudgetError, match="of='total'"):
        Plan.from_scores(program, scores_of(program), 0.3, per_layer=True, of="total")


def test_a_layer_is_the_path_up_to_the_first_number():
    assert layer_of("model.layers.12.self_attn") == "model.layers.12"
    assert layer_of("h.3") == "h.3"
    assert layer_of("attention") == "attention"
