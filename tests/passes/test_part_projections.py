"""part-projections: queries, keys and values of one projection are told apart where values are pruned."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.capturing.module_capture import capture
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.printer import print_program
from dispfx.ir.program import Program
from dispfx.passes.canonicalize import Canonicalize
from dispfx.passes.part_projections import PartProjections
from dispfx.plan.plan import Plan
from tests.one_branch import WIDTH, one_branch, require_one_function
from tests.passes.golden import calls_of
from tests.programs import token_ids

HEADS, SIZE = 4, 8
Parts = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Fused(nn.Module):
    """One projection; `parts` takes queries, keys and values from it, (B, T, heads, SIZE) each."""

    def __init__(self, rows: int, parts: Parts):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, rows * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in self.parts(self.qkv(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def by_select(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.unflatten(-1, (HEADS, 3, SIZE))
    return parts[..., 0, :], parts[..., 1, :], parts[..., -1, :]


def by_view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = x.view(x.shape[0], x.shape[1], HEADS, 3, SIZE)
    return parts[..., 0, :], parts[..., 1, :], parts[..., 2, :]


def by_slice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two groups of two queries, a key and a value."""
    parts = x.unflatten(-1, (2, 4, SIZE))
    q, k, v = parts[:, :, :, :-2], parts[:, :, :, -2:-1], parts[:, :, :, 3:]
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


def by_list(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One key and one value for all queries, taken by lists of positions."""
    parts = x.unflatten(-1, (HEADS + 2, SIZE))
    return parts[..., :-2, :], parts[..., [-2], :], parts[..., [-1], :]


def turned(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions that are no neighbours."""
    parts = x.unflatten(-1, (HEADS + 2, SIZE))
    return parts[..., [0, 2, 1, 3], :], parts[..., 4:5, :], parts[..., 5:6, :]


def scaled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All of them meet one number."""
    parts = x.unflatten(-1, (HEADS, 3, SIZE)) * 2.0
    return parts[..., 0, :], parts[..., 1, :], parts[..., 2, :]


def by_length(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As many heads as there are sequences, which is no fixed number."""
    parts = x.unflatten(-1, (HEADS + 2, SIZE))
    return parts[..., :HEADS, :], parts[..., : x.shape[0], :][..., :1, :], parts[..., 5:6, :]


def unbound(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.unflatten(-1, (HEADS, 3, SIZE)).unbind(-2)
    return q, k, v


CASES: dict[str, tuple[int, Parts, int]] = {
    "select": (3 * HEADS, by_select, HEADS),
    "select of a view": (3 * HEADS, by_view, HEADS),
    "slice": (8, by_slice, 2),
    "list": (HEADS + 2, by_list, 1),
}
LEFT: dict[str, tuple[int, Parts]] = {
    "no neighbours": (HEADS + 2, turned),
    "another user": (3 * HEADS, scaled),
    "a number that changes": (HEADS + 2, by_length),
    "unbind": (3 * HEADS, unbound),
}


def before(rows: int, parts: Parts) -> Program:
    return Pipeline([Canonicalize()]).run(capture(one_branch(lambda: Fused(rows, parts))))


def test_parts_are_slices_of_both_factors_as_one():
    """Rule 1: select, and slices, which keep their dimension."""
    program = before(3 * HEADS, by_select)
    found = Pipeline([PartProjections(("attention-values",))]).run(program.clone())
    assert "select" in print_program(program) and "select" not in print_program(found)
    assert calls_of(found, "slice").splitlines() == [
        f"slice(unflatten_int, 3, {at * SIZE}, {(at + 1) * SIZE}): (B, T, {HEADS}, {SIZE}) float32"
        for at in range(3)
    ]
    again = found.clone()
    assert not PartProjections(("attention-values",)).run(again).changed


@pytest.mark.parametrize("name", CASES)
def test_values_of_every_head_are_found_and_no_bit_changes(name: str):
    """Rule 1: by position, slice, or list."""
    rows, parts, heads = CASES[name]
    model = one_branch(lambda: Fused(rows, parts))
    program = dispfx.capture(model, sites="attention-values")
    ids = token_ids(2, 9, vocabulary=31)
    with torch.no_grad():
        assert torch.equal(program.graph_module(ids), model(ids))
    (site,) = [one for one in program.sites if one.kind == "values"]
    assert (site.size, site.experts) == (heads * SIZE, heads)
    generator = torch.Generator().manual_seed(2)
    drawn = {one.name: torch.rand(one.experts, one.per_expert, generator=generator) for one in program.sites}
    kept = {
        one.name: drawn[one.name].argsort(1)[:, : one.per_expert // 2]
        + torch.arange(one.experts)[:, None] * one.per_expert
        for one in program.sites
    }
    plan = Plan.from_masks(program, {name: own.flatten() for name, own in kept.items()})
    require_one_function(model, program, plans=[plan])


@pytest.mark.parametrize("name", LEFT)
def test_other_projections_are_left_alone(name: str):
    """Rule 2."""
    program = before(*LEFT[name])
    printed = print_program(program)
    assert not PartProjections(("attention-values",)).run(program).changed
    assert print_program(program) == printed


def test_without_values_nothing_is_taken_apart():
    """Rule 2."""
    program = before(3 * HEADS, by_select)
    assert not PartProjections(("heads",)).run(program).changed
