"""One run's plans: each meets its ratio, nested ones are subsets, and a file gives the same plans again."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dispfx
from dispfx.errors import BudgetError, DataError, PlanMismatchError
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget, require_range
from dispfx.plan.family import Family
from dispfx.plan.groups import Groups
from dispfx.plan.hardening import ParameterCount, removal_order
from dispfx.plan.knots import ONE_KNOT, Knots, mixed, unmixed
from dispfx.plan.plan import Plan, is_family_file
from tests.programs import program_of, relative_error, token_ids
from tests.tiny_transformers import tiny_transformer

KNOTS = Knots.of_range(0.1, 0.6)


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of("fused-gate-up")


def rows_of(program: Program, knots: Knots, seed: int = 0) -> Tensor:
    """Return logits as a run leaves them: random ones, that fall by another number for every group."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [site.size for site in program.sites]
    first_N = 2 + torch.randn(sum(sizes), generator=generator)
    fallen_KG = torch.rand(len(knots.ratios), len(sizes), generator=generator).cumsum(0)
    return first_N - torch.repeat_interleave(fallen_KG, torch.tensor(sizes), 1)


def family_of(program: Program, *, align: int = 1, seed: int = 0) -> Family:
    return Family.of(program, Budget(0.6, align=align), KNOTS, rows_of(program, KNOTS, seed))


def test_knots_are_a_tenth_apart_and_weights_are_linear_between_them():
    assert KNOTS.ratios == pytest.approx((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    assert Knots.of_range(0.3, 0.35).ratios == (0.3, 0.35)
    weights_SK = KNOTS.weights(torch.tensor([0.1, 0.2, 0.25, 0.6]))
    expected = torch.tensor(
        [[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    )
    torch.testing.assert_close(weights_SK, expected, atol=1e-6, rtol=0)


def test_every_part_of_the_range_is_drawn_from_and_one_ratio_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([KNOTS.drawn(4, generator) for _ in range(200)])
    bounds = torch.linspace(0.1, 0.6, 5)
    assert bool((drawn >= bounds[:-1]).all() and (drawn <= bounds[1:]).all())
    assert drawn.mean(0).tolist() == pytest.approx(((bounds[1:] + bounds[:-1]) / 2).tolist(), abs=0.01)
    before = generator.get_state()
    assert Knots((0.3,)).drawn(2, generator).tolist() == pytest.approx([0.3, 0.3])
    assert torch.equal(generator.get_state(), before)


def test_unmixed_is_the_gradient_of_mixed_and_one_knot_changes_no_bit():
    logits_KN = torch.randn(6, 5, requires_grad=True)
    weights_SK, scale_SN = KNOTS.weights(torch.tensor([0.1, 0.33, 0.57])), torch.randn(3, 5)
    (expected,) = torch.autograd.grad((mixed(logits_KN, weights_SK) * scale_SN).sum(), logits_KN)
    torch.testing.assert_close(unmixed(scale_SN, weights_SK), expected)
    one = ONE_KNOT.weights(torch.zeros(3))
    row_1N = torch.randn(1, 5)
    assert torch.equal(mixed(row_1N, one), row_1N.expand(3, 5))
    assert torch.equal(unmixed(scale_SN, one), scale_SN.sum(0, keepdim=True))


@pytest.mark.parametrize("ratio", [0.1, 0.137, 0.3, 0.456, 0.6])
def test_every_ratio_of_the_range_is_met_and_its_plan_prunes(program: Program, ratio: float):
    plan = family_of(program).at(program, ratio)
    assert abs(plan.achieved - ratio) <= 0.01, "half a step of the widest weight"
    assert plan.budget.ratio == ratio
    ids = token_ids(2, 7)
    assert relative_error(dispfx.lower(program, plan)(ids), dispfx.gated(program, plan)(ids)) < 2e-6


def test_the_order_says_where_between_two_knots_a_feature_goes(program: Program):
    groups, features = Groups.alone(program.sites), sum(site.size for site in program.sites)
    count = ParameterCount.of_sites(program.sites, program.shapes)
    budgets = [Budget(0.2), Budget(0.3)]
    above = torch.linspace(4.0, -4.0, features)
    rows_KN = torch.stack((above + 1.0, above - 1.0))
    order_N = removal_order(rows_KN, program.sites, count, budgets, groups=groups)
    assert bool((order_N[:-1] >= order_N[1:]).all()), "one order in both rows stays that order"
    assert bool((order_N > 0.3).any()) and bool((order_N < 0.2).any())


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_a_smaller_plan_keeps_only_what_a_larger_one_keeps(program: Program, seed: int, align: int):
    family = family_of(program, align=align, seed=seed)
    plans = [family.at(program, ratio) for ratio in torch.linspace(0.1, 0.6, 23).tolist()]
    for larger, smaller in pairwise(plans):
        for name, kept in smaller.kept.items():
            assert set(kept.tolist()) <= set(larger.kept[name].tolist()), name


def test_heads_and_values_follow_the_same_order():
    program = dispfx.capture(tiny_transformer("llama"), sites=("heads", "attention-values"))
    family = Family.of(program, Budget(0.6), KNOTS, rows_of(program, KNOTS))
    larger, smaller = family.at(program, 0.25), family.at(program, 0.5)
    assert {"heads", "values"} <= {one.kind for one in larger.selections}
    for name, kept in smaller.kept.items():
        assert set(kept.tolist()) <= set(larger.kept[name].tolist()), name
    ids = torch.arange(14).view(2, 7)
    for plan in (larger, smaller):
        assert relative_error(dispfx.lower(program, plan)(ids), dispfx.gated(program, plan)(ids)) < 2e-6


def test_sites_that_share_a_selection_share_it_at_every_ratio(program: Program):
    groups = Groups.constrained(program.sites)
    rows = groups.expand(torch.randn(len(KNOTS.ratios), groups.features))
    family = Family.of(program, Budget(0.5), KNOTS, rows, constrained=True)
    kept = family.at(program, 0.22).for_sites(program.sites)
    gathered = [own for site, own in zip(program.sites, kept, strict=True) if site.is_gathered]
    assert len(gathered) > 1 and all(torch.equal(own, gathered[0]) for own in gathered)


def test_values_of_groups_come_back_from_those_of_sites(program: Program):
    groups = Groups.constrained(program.sites)
    values = torch.randn(2, groups.features)
    assert torch.equal(groups.of_first(groups.expand(values)), values)


def test_a_file_gives_the_same_plans_again(program: Program, tmp_path: Path):
    family = family_of(program, align=2)
    family = replace(family, plan=replace(family.plan, bos=(1,), made_from={"decoder": "x"}, seed=7))
    family.save(tmp_path / "family.safetensors")
    again = Family.load(tmp_path / "family.safetensors")
    assert (again.smallest, again.largest) == (0.1, 0.6) and again.plan == family.plan
    plan, other = (one.at(program, 0.345) for one in (family, again))
    assert plan == other and (other.bos, other.made_from, other.seed) == ((1,), {"decoder": "x"}, 7)
    assert is_family_file(tmp_path / "family.safetensors")


def test_a_family_file_is_no_plan_file_and_a_plan_file_no_family(program: Program, tmp_path: Path):
    family = family_of(program)
    family.save(tmp_path / "family.safetensors")
    family.plan.save(tmp_path / "plan.safetensors")
    with pytest.raises(DataError, match="not a plan: it is a family of plans"):
        Plan.load(tmp_path / "family.safetensors")
    with pytest.raises(DataError, match="not a family: it holds one plan"):
        Family.load(tmp_path / "plan.safetensors")
    assert not is_family_file(tmp_path / "plan.safetensors")
    assert not is_family_file(tmp_path / "none.safetensors")
    with pytest.raises(DataError, match="the family file does not exist"):
        Family.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(("ratio", "wider"), [(0.05, "0.05:0.6"), (0.7, "0.1:0.7")])
def test_a_ratio_outside_the_range_is_refused_with_the_range(program: Program, ratio: float, wider: str):
    with pytest.raises(BudgetError, match=r"ratios from 0\.1 to 0\.6, but 0\.\d+ was asked for") as error:
        family_of(program).at(program, ratio)
    assert wider in str(error.value.hint)


def test_a_ratio_that_is_no_share_is_refused(program: Program):
    with pytest.raises(BudgetError, match="ratio must be a share"):
        family_of(program).at(program, 37)


def test_a_family_of_another_decoder_is_refused(program: Program):
    with pytest.raises(PlanMismatchError, match="made for a decoder with fingerprint"):
        family_of(program).at(program_of("pre-norm"), 0.3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: order[:-1], "numbers for"),
        (lambda order: order[None], "numbers for"),
        (lambda order: order.double(), "float64 numbers"),
        (lambda order: order * torch.nan, "not finite"),
    ],
)
def test_an_impossible_order_in_a_file_is_refused(program: Program, change, message: str, tmp_path: Path):
    from safetensors import safe_open

    path = tmp_path / "family.safetensors"
    family_of(program).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = next(name for name in tensors if name.startswith("order of "))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, path, metadata=metadata)
    with pytest.raises(DataError, match=message):
        Family.load(path)


@pytest.mark.parametrize(
    "ratios", [0.3, (0.3,), (0.5, 0.2), (0.3, 0.3), (0.0, 0.4), (0.2, 1.0), (10, 50), "0.1:0.2"]
)
def test_what_is_no_range_is_refused(ratios):
    with pytest.raises(BudgetError):
        require_range(ratios)
    assert require_range([0.25, 0.5]) == (0.25, 0.5)
