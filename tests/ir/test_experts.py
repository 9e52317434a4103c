"""Which mixtures are known to give every expert features of its own, and which are not."""

import pytest
import torch
from torch import nn

import dispfx
from dispfx.errors import PlanMismatchError
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY, WIDTH, require_one_function
from tests.programs import plan_keeping, relative_error, token_ids
from tests.stacked_experts import (
    EACH,
    EXPERTS,
    all_of_them,
    by_two_routers,
    decoder,
    gathered,
    in_bounded_runs,
    in_falling_runs,
    in_gathered_runs,
    in_runs,
    in_runs_of_unknown_numbers,
    in_runs_scaled_alike,
    in_runs_turned_round,
    in_wrongly_bounded_runs,
    merged,
)

# (how experts are computed, whether they have biases) -> how the graph tells whose a position is.
OWN = {
    (gathered, False): "ids",
    (gathered, True): "ids",
    (in_runs, False): "ids",
    (in_runs, True): "ids",
    (in_gathered_runs, True): "ids",
    (in_bounded_runs, True): "ids",
    (in_runs_of_unknown_numbers, False): "ends",
    (all_of_them, False): "positions",
}
SHARED = {
    (by_two_routers, False): "two products take matrices of different experts",
    (in_wrongly_bounded_runs, True): "the bias is another expert's",
    (in_falling_runs, True): "the numbers are not sorted as the runs are",
    (in_runs_turned_round, False): "the features are in another order behind the first product",
    (in_runs_of_unknown_numbers, True): "nothing says that the numbers are those of the runs",
}


def name(case: object) -> str:
    return f"{case[0].__name__}{' with bias' * case[1]}"  # type: ignore[index]


def inner_site(program: Program) -> Site:
    (site,) = [site for site in program.sites if site.kind == "inner"]
    return site


@pytest.mark.parametrize("case", OWN, ids=name)
def test_every_expert_has_its_own_features(case):
    """Rules 2 and 3 of stacked_experts."""
    model = decoder(case[0], bias=case[1])
    program = dispfx.capture(model)
    site = inner_site(program)
    assert not program.refused
    assert (site.size, site.experts, site.per_expert) == (EXPERTS * EACH, EXPERTS, EACH)
    assert {point.rows.kind for point in site.gates if point.rows} == {OWN[case]}
    assert all(cut.by_expert for cut in site.slices)
    require_one_function(model, program)


@pytest.mark.parametrize("case", OWN, ids=name)
def test_a_removed_feature_of_one_expert_matters_to_its_tokens_alone(case):
    """The gated and the lowered decoder differ from the plain one exactly where the expert was chosen."""
    program = dispfx.capture(decoder(case[0], bias=case[1]))
    expert = 2
    others = [i for i in range(EXPERTS * EACH) if i // EACH != expert]
    mask = torch.ones(EXPERTS * EACH)
    mask[expert * EACH :][:EACH] = 0.0
    masks = [mask if site.kind == "inner" else torch.ones(site.size) for site in program.sites]
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    x = program.parameters["embedding.weight"][ids]
    scores = x @ program.parameters["mlp.router.weight"].T + program.parameters["mlp.router.bias"]
    chosen = (scores.topk(2).indices == expert).any(-1)
    assert chosen.any() and not chosen.all()
    assert len(others) == (EXPERTS - 1) * EACH
    moved = (dispfx.api.gate(program)(ids, masks) != program.graph_module(ids)).any(-1)
    assert torch.equal(moved, chosen)


@pytest.mark.parametrize("case", SHARED, ids=name)
def test_where_the_expert_is_not_known_all_share_one_selection(case):
    """Rules 2, 3 and 4 of stacked_experts."""
    model = decoder(case[0], bias=case[1])
    program = dispfx.capture(model)
    site = inner_site(program)
    assert (site.size, site.experts) == (EACH, 1), SHARED[case]
    assert not any(cut.by_expert for cut in site.slices)
    require_one_function(model, program)


def test_a_vector_that_scales_the_features_of_all_experts_gives_all_one_selection():
    """Rule 1 of stacked_experts."""
    model = decoder(in_runs_scaled_alike)
    model.get_submodule("mlp").register_parameter("scale", nn.Parameter(0.5 + torch.rand(EACH)))
    program = dispfx.capture(model)
    site = inner_site(program)
    assert (site.size, site.experts) == (EACH, 1)
    require_one_function(model, program)


def test_merged_experts_have_no_features_of_their_own():
    program = dispfx.capture(decoder(merged))
    assert all(site.experts == 1 for site in program.sites)
    require_one_function(decoder(merged), program)


def test_reads_and_writes_are_shared_by_all_experts():
    program = dispfx.capture(decoder(in_runs))
    assert all(site.experts == 1 and site.size == WIDTH for site in program.sites if site.kind != "inner")


def test_experts_may_keep_quite_different_features():
    """Lowered stacks hold for every expert the rows of its own selection. Rule 7 of lower_gates."""
    program = dispfx.capture(decoder(in_runs, bias=True))
    site = inner_site(program)
    own = [[0, 3], [6, 7], [1, 2], [4, 5]]
    plan = plan_keeping(program, {site.name: [e * EACH + i for e in range(EXPERTS) for i in own[e]]})
    lowered = dict(dispfx.lower(program, plan).named_parameters())
    dense = program.parameters
    for expert, kept in enumerate(own):
        assert torch.equal(lowered["mlp.up"][expert], dense["mlp.up"][expert][:, kept])
        assert torch.equal(lowered["mlp.down"][expert], dense["mlp.down"][expert][kept])
        assert torch.equal(lowered["mlp.up_bias"][expert], dense["mlp.up_bias"][expert][kept])
    ids = token_ids(1, 17, vocabulary=VOCABULARY)
    expected = dispfx.gated(program, plan)(ids)
    assert relative_error(dispfx.lower(program, plan)(ids), expected) <= 1e-6


def test_experts_that_keep_unlike_numbers_make_no_plan():
    program = dispfx.capture(decoder(gathered))
    site = inner_site(program)
    with pytest.raises(PlanMismatchError, match=r"equally many features, found \[7, 8, 8, 8\]"):
        plan_keeping(program, {site.name: list(range(1, EXPERTS * EACH))})


def test_a_plan_of_one_way_lowers_another():
    """Ways to compute experts differ by capture; the plan names parameters, which are the same."""
    programs = [dispfx.capture(decoder(way)) for way in (gathered, in_runs, in_runs_of_unknown_numbers)]
    plan = Plan.random(programs[0], 0.4, seed=3)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    expected = dispfx.gated(programs[0], plan)(ids)
    for program in programs:
        assert relative_error(dispfx.lower(program, plan)(ids), expected) <= 1e-6
