"""Times of whole steps: the model between measured points, and constraints that it decides."""

from dataclasses import asdict, replace
from typing import Any

import numpy
import pytest
import torch

import dispfx
from dispfx.errors import BudgetError, DataError
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.decoder_count import count_of
from dispfx.plan.hardening import hard_masks, harden
from dispfx.plan.latency_table import LatencyTable, StepTimes
from dispfx.plan.plan import Plan
from dispfx.plan.step_time import rising, seconds_at
from tests.plan.test_cache_cut import QUICK, TOKENS, llama


@pytest.fixture(scope="module")
def program() -> Program:
    return dispfx.capture(llama(8), sites="heads")


def times_of(program: Program, cache_seconds: float = 0.0) -> StepTimes:
    """Return times of a decoder that takes 10 ms, and pruned 4 ms and 8 ms for what is left of it."""
    sizes = tuple(round(share * program.size) for share in (0.2, 0.6, 0.9))
    return StepTimes(1, 1, 64, "eager", program.size, 10e-3, sizes, (4e-3, 8e-3, 9e-3), cache_seconds)


def table_of(*steps: StepTimes) -> LatencyTable:
    return LatencyTable("a card", "float32", 1, (1, 100), (1, 100), ((1.0, 1.0), (1.0, 1.0)), steps=steps)


def budget_of(program: Program, *constraints: str, cache_seconds: float = 0.0) -> Budget:
    return Budget(0.0, costs=table_of(times_of(program, cache_seconds)), constraints=constraints)


def hardened(program: Program, budget: Budget, seed: int = 0) -> Plan:
    count = count_of(budget, program)
    logits = torch.randn(count.features, generator=torch.Generator().manual_seed(seed))
    return Plan.of(program, budget, harden(logits, program.sites, count, budget), seed)


def test_times_are_linear_between_points_and_continue_at_both_ends(program: Program):
    times = times_of(program)
    for share in (0.05, 0.2, 0.3, 0.6, 0.75, 0.9, 1.0):
        expected = numpy.interp(share, (0.0, 0.2, 0.6, 0.9, 1.2), (2e-3, 4e-3, 8e-3, 9e-3, 10e-3))
        assert seconds_at(times, round(share * program.size)) == pytest.approx(expected, rel=1e-3)


def test_the_model_of_masks_is_that_of_their_parameters_and_has_its_gradient(program: Program):
    (limit,) = count_of(budget_of(program, "decode 1@64: 1.5x"), program).limits
    assert limit.dense == 10e-3 and limit.most == pytest.approx(10e-3 / 1.5)
    plan = Plan.random(program, 0.4, seed=0)
    masks = hard_masks(program.sites, plan.for_sites(program.sites))
    left = sum(one.numel() for one in dispfx.lower(program, plan).parameters())
    assert limit.left_of(masks) == pytest.approx(seconds_at(times_of(program), left))
    soft = (0.5 + 0.4 * torch.rand(2, len(masks), dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(limit.left, soft, atol=1e-9, eps=1e-4)


def test_heads_save_their_share_of_the_cache(program: Program):
    with_heads, without = (
        count_of(budget_of(program, "decode 1@64: 1.5x", cache_seconds=seconds), program).limits[0]
        for seconds in (2e-3, 0.0)
    )
    kept = {one.name: range(2 if one.kind == "heads" else one.size) for one in program.sites}
    masks = hard_masks(program.sites, Plan.from_masks(program, kept).for_sites(program.sites))
    assert without.left_of(masks) - with_heads.left_of(masks) == pytest.approx(2e-3 * 6 / 8)


@pytest.mark.parametrize(
    ("text", "most"),
    [("decode 1@64: 1.5x", 10e-3 / 1.5), ("decode 1 @ 64: 5 ms", 5e-3), ("decode 1@64:9ms", 9e-3)],
)
@pytest.mark.parametrize("cache_seconds", [0.0, 2e-3])
def test_a_time_is_met_closely_and_never_exceeded(
    program: Program, text: str, most: float, cache_seconds: float
):
    for seed in range(3):
        (met,) = hardened(program, budget_of(program, text, cache_seconds=cache_seconds), seed).met
        assert met.dense == 10e-3 and met.most == pytest.approx(most)
        assert 0.99 * most <= met.left <= most


def test_branches_are_cut_whatever_the_table_says_of_their_products(program: Program):
    """Products of this table are never faster, so that every branch would stay dense."""
    budget = budget_of(program, "decode 1@64: 1.5x")
    assert (
        budget.costs_of_branches is None and replace(budget, constraints=()).costs_of_branches is budget.costs
    )
    assert hardened(program, budget).achieved > 0.3


def test_a_time_and_a_size_are_both_met(program: Program):
    first, second = hardened(program, budget_of(program, "decode 1@64: 1.2x", "size: 55%")).met
    assert first.left <= first.most and second.left <= second.most
    assert max(first.left / first.most, second.left / second.most) > 0.99


def test_a_time_out_of_reach_is_refused_with_what_is_possible(program: Program):
    with pytest.raises(BudgetError, match=r"decode 1@64: 1 ms, where at least \d\.\d+ ms of 10 ms stay"):
        hardened(program, budget_of(program, "decode 1@64: 1 ms"))
    with pytest.raises(BudgetError, match="met without removing anything: decode 1@64: 11 ms"):
        hardened(program, budget_of(program, "decode 1@64: 11 ms"))


def test_a_table_without_the_step_or_of_another_decoder_is_refused(program: Program):
    with pytest.raises(BudgetError, match="the latency table has decode 1@64") as error:
        count_of(budget_of(program, "prefill 1x64: 2x"), program)
    assert "`step='prefill 1x64'`" in str(error.value.hint)
    with pytest.raises(BudgetError, match="has no step"):
        count_of(Budget(0.0, constraints=("decode 1@64: 2x",), costs=table_of()), program)
    other = dispfx.capture(llama(4), sites="heads")
    with pytest.raises(BudgetError, match=r"of \d+,\d+ parameters, and this one has \d+,\d+"):
        count_of(budget_of(program, "decode 1@64: 2x"), other)


def test_masks_are_learned_under_a_time(program: Program):
    plan = dispfx.learn(
        program, TOKENS, constraint="decode 1@64: 1.4x", costs=table_of(times_of(program)), **QUICK
    )
    (met,) = plan.met
    assert 0.99 <= met.left / met.most <= 1.0


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([1.0, 2.0, 3.0], (1.0, 2.0, 3.0)),
        ([2.0, 1.0, 3.0], (1.5, 1.5, 3.0)),
        ([3.0, 2.0, 1.0], (2.0, 2.0, 2.0)),
        ([1.0, 4.0, 2.0, 3.0, 5.0], (1.0, 3.0, 3.0, 3.0, 5.0)),
        ([1.0], (1.0,)),
    ],
)
def test_noise_makes_no_larger_decoder_faster(measured: list[float], expected: tuple[float, ...]):
    assert rising(measured) == pytest.approx(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [1.0]},
        {"seconds": [3.0, 2.0, 1.0]},
        {"seconds": [1.0, 2.0, float("nan")]},
        {"parameters": [3, 2, 1]},
        {"parameters": [0, 2, 3]},
        {"dense_seconds": -1.0},
        {"cache_seconds": float("inf")},
        {"batch": 0},
        {"past": -1},
        {"tokens": "many"},
        {"mode": None, "parameters": None},
    ],
)
def test_a_damaged_step_is_refused(program: Program, change: dict[str, Any]):
    plain = asdict(table_of(times_of(program)))
    assert LatencyTable.of_plain(plain).steps == (times_of(program),)
    with pytest.raises(DataError, match="not a latency table"):
        LatencyTable.of_plain({**plain, "steps": [{**plain["steps"][0], **change}]})
    for steps in (3, [3], {"a": 1}, None):
        with pytest.raises(DataError, match="not a latency table"):
            LatencyTable.of_plain({**plain, "steps": steps})
