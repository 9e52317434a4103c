"""Tables of costs: times between measured sizes, and plans in which no branch is slower than dense."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy
import pytest
import torch

import dispfx
from dispfx.errors import BudgetError, DataError
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import ParameterCount, hard_masks, harden
from dispfx.plan.latency_table import LatencyTable, branch_costs, read_costs
from dispfx.plan.plan import Plan
from dispfx.run.folder_report import left_dense
from tests.plain_decoders import FORMS, build
from tests.programs import program_of

# A product costs what its weight has, in microseconds.
FAIR = LatencyTable("a card", "float32", 64, (1, 1000), (1, 1000), ((1e-6, 1e-3), (1e-3, 1.0)))


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of("pre-norm")


def hardened(program: Program, budget: Budget, seed: int = 0) -> list[torch.Tensor]:
    count = ParameterCount.of_sites(program.sites, program.shapes)
    logits = torch.randn(count.features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return harden(logits, program.sites, count, budget)


def costs_of(program: Program, table: LatencyTable, kept: list[torch.Tensor]):
    masks = hard_masks(program.sites, kept).split([site.size for site in program.sites])
    return branch_costs(table, program.sites, program.shapes, masks)


def removed(program: Program, kept: list[torch.Tensor]) -> float:
    count = ParameterCount.of_sites(program.sites, program.shapes)
    return 1 - count.count_kept(hard_masks(program.sites, kept)) / count.dense


def test_times_are_linear_between_sizes_and_in_proportion_beyond():
    table = LatencyTable("a card", "float32", 1, (10, 20), (100, 300), ((1.0, 2.0), (3.0, 6.0)))
    assert table.product_seconds(10, 100) == 1.0 and table.product_seconds(20, 300) == 6.0
    assert table.product_seconds(15, 100) == 2.0 and table.product_seconds(15, 200) == 3.0
    assert table.product_seconds(40, 300) == 12.0 and table.product_seconds(20, 600) == 12.0
    assert table.product_seconds(1, 1) == 1.0, "a small product costs what starting it costs"


def test_a_branch_costs_its_products_and_its_selections(program: Program):
    full = [torch.arange(site.size, dtype=torch.int32) for site in program.sites]
    table = replace(FAIR, selection_seconds=0.25)
    costs = costs_of(program, table, full)
    assert len(costs) == len(program.branches)
    for cost in costs:
        assert cost.dense_seconds == cost.pruned_seconds and not cost.is_slower
    kept = [
        torch.arange(site.size // 2 if site.kind == "read" else site.size, dtype=torch.int32)
        for site in program.sites
    ]
    attention, mlp = costs_of(program, table, kept)[:2]
    # Read features are columns of three products of 32 × 32, and of two of 48 × 32.
    assert numpy.isclose(attention.dense_seconds - attention.pruned_seconds, 3 * 32 * 16 * 1e-6 - 0.25)
    assert numpy.isclose(mlp.dense_seconds - mlp.pruned_seconds, 2 * 48 * 16 * 1e-6 - 0.25)
    assert attention.is_slower and mlp.is_slower


def test_a_head_costs_its_rows_and_columns():
    """As the products of the lowered decoder do."""
    program = dispfx.capture(build(FORMS["pre-norm"]), sites="heads")
    kept = [
        torch.arange(1 if site.kind == "heads" else site.size, dtype=torch.int32) for site in program.sites
    ]
    attention, mlp = costs_of(program, FAIR, kept)[:2]
    # One of four heads of eight features: 32 × 32 become 8 × 32 (query, key, value) and 32 × 8.
    assert numpy.isclose(attention.dense_seconds, 4 * 32 * 32 * 1e-6, rtol=1e-3)
    assert numpy.isclose(attention.pruned_seconds, 4 * 8 * 32 * 1e-6, rtol=1e-3)
    assert mlp.dense_seconds == mlp.pruned_seconds
    dear = replace(FAIR, selection_seconds=1.0)
    assert not costs_of(program, dear, kept)[0].is_slower, "nothing is selected or placed"


def test_a_fair_table_changes_nothing(program: Program):
    plain, with_costs = (hardened(program, Budget(0.4, costs=costs)) for costs in (None, FAIR))
    assert all(map(torch.equal, plain, with_costs))


def test_branches_that_would_be_slower_are_left_dense_and_the_budget_holds(program: Program):
    # Cut by 30 % each, no branch gains what its selections cost; cut by more, some do.
    table = replace(FAIR, selection_seconds=1.5e-3)
    for seed in range(2):
        kept = hardened(program, Budget(0.3, costs=table), seed)
        assert abs(removed(program, kept) - 0.3) <= 0.005
        assert not any(cost.is_slower for cost in costs_of(program, table, kept))
        whole = {
            branch.name
            for branch in program.branches
            if all(
                len(indices) == site.size
                for site, indices in zip(program.sites, kept, strict=True)
                if site.name in branch.sites
            )
        }
        assert 0 < len(whole) < len(program.branches)
        again = hardened(program, Budget(0.3, costs=table), seed)
        assert all(map(torch.equal, kept, again)), "the same table gives the same plan"
    plain = hardened(program, Budget(0.3), 0)
    assert any(cost.is_slower for cost in costs_of(program, table, plain)), "the table must matter"


def test_a_budget_that_only_slower_branches_could_meet_is_refused(program: Program):
    table = replace(FAIR, selection_seconds=1.0)
    with pytest.raises(BudgetError, match=r"remove 0\.0000"):
        hardened(program, Budget(0.3, costs=table))


def test_a_plan_keeps_its_table(program: Program, tmp_path: Path):
    kept = hardened(program, Budget(0.3, costs=FAIR))
    plan = Plan.of(program, Budget(0.3, costs=FAIR), kept, seed=0)
    plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors").budget == plan.budget
    assert LatencyTable.of_plain(json.loads(json.dumps(asdict(FAIR)))) == FAIR


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": [2, 1]}, "must increase"),
        ({"columns": []}, "must increase"),
        ({"seconds": [[1.0, 1.0]]}, "every pair"),
        ({"seconds": [[1.0, 1.0], [1.0, -1.0]]}, "positive"),
        ({"seconds": [[1.0, 1.0], [1.0, float("nan")]]}, "positive"),
        ({"selection_seconds": -1.0}, "positive"),
        ({"tokens": "many"}, "not a latency table"),
    ],
)
def test_a_damaged_table_is_refused(change: dict, problem: str):
    with pytest.raises(DataError, match=problem):
        LatencyTable.of_plain({**asdict(FAIR), **change})
    with pytest.raises(DataError, match="not a latency table"):
        LatencyTable.of_plain([1, 2])


def test_a_table_is_read_from_json_and_nothing_else(tmp_path: Path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(asdict(FAIR)))
    assert read_costs(file) == FAIR
    file.write_text("{")
    with pytest.raises(DataError, match="latency table"):
        read_costs(file)
    with pytest.raises(DataError, match="latency table"):
        read_costs(tmp_path / "missing.json")


def test_a_report_names_the_branches_that_were_left_dense(program: Program):
    table = replace(FAIR, selection_seconds=1.5e-3)
    budget = Budget(0.3, costs=table)
    plan = Plan.of(program, budget, hardened(program, budget), seed=0)
    found = left_dense(plan, program.sites)
    assert found and all("a card at 64 tokens" in refused.reason for refused in found)
    assert not left_dense(replace(plan, budget=Budget(0.3)), program.sites)
