"""The checks of a compile fail where something is wrong, however small."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dispfx
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import lowered_lines, noisy_tensors, unread_lines, zeroed_tensors
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids

# A branch so weak that no tolerance sees it.
FAINT = 1e-7


@pytest.fixture
def faint() -> Program:
    """A decoder whose first MLP adds next to nothing."""
    model = build(FORMS["pre-norm"])
    with torch.no_grad():
        model.get_parameter("layers.0.mlp.down.weight").mul_(FAINT)
    return dispfx.capture(model)


def without_gate(program: Program, name: str) -> Program:
    """Return the program as if the last gate of a site had been forgotten."""
    sites = [replace(site, gates=site.gates[:-1]) if site.name == name else site for site in program.sites]
    twin = program.clone()
    twin.sites = tuple(sites)
    return twin


def test_noise_stands_where_the_plan_cuts_and_nowhere_else(faint: Program):
    plan = Plan.random(faint, 0.3, seed=1)
    zeroed, noisy = zeroed_tensors(faint, plan), noisy_tensors(faint, plan)
    assert zeroed.keys() == noisy.keys() and zeroed
    for path, tensor in faint.parameters.items():
        if path in noisy:
            changed = noisy[path] != tensor
            assert torch.equal(changed, (zeroed[path] == 0) & (tensor != 0)) and bool(changed.any())


@pytest.mark.parametrize("name", ["layers.0.mlp.read", "layers.0.mlp.inner", "layers.0.mlp.write"])
def test_a_forgotten_gate_shows_even_on_a_branch_that_adds_next_to_nothing(faint: Program, name: str):
    plan = Plan.random(faint, 0.3, seed=1)
    whole = unread_lines(faint, plan, dispfx.gated(faint, plan))
    assert whole and all(line.holds for line in whole)
    broken = without_gate(faint, name)
    hard = dispfx.gated(broken, plan)
    ids = token_ids(2, 9)
    apart = (hard(ids) - dispfx.gated(faint, plan)(ids)).abs().max()
    assert apart <= 1e-4 * hard(ids).abs().max(), "a tolerance alone must be blind to this"
    assert not any(line.holds for line in unread_lines(broken, plan, hard))


def test_every_line_of_a_lowered_decoder_holds():
    model = build(FORMS["fused-gate-up"])
    program = dispfx.capture(model)
    plan = Plan.random(program, 0.3, seed=2)
    lines = lowered_lines(program, plan, dispfx.lower(program, plan), model)
    assert {line.name for line in lines} == {
        "lowered = gated", "lowered = zeroed", "removed is unread", "gather-add = lowered",
    }  # fmt: skip
    assert all(line.holds for line in lines)


class Float8Linear(nn.Module):
    """A product by a weight of float8 and a scale per output, as a checkpoint in FP8 has it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 100.0)
        scaled = (linear.weight.detach() / self.scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(scaled, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def test_a_weight_in_float8_is_zeroed_where_the_plan_cuts():
    model: Any = build(FORMS["pre-norm"], layers=1)
    mlp = model.layers[0].mlp
    mlp.up, mlp.down = Float8Linear(mlp.up), Float8Linear(mlp.down)
    program = dispfx.capture(model)
    plan = Plan.random(program, 0.4, seed=1)
    zeroed = zeroed_tensors(program, plan)["layers.0.mlp.up.weight"]
    inner, read = (plan.kept[f"layers.0.mlp.{kind}"].long() for kind in ("inner", "read"))
    expected = torch.zeros(48, 32)
    expected[inner[:, None], read] = mlp.up.weight.detach().float()[inner[:, None], read]
    assert zeroed.dtype == torch.float8_e4m3fn and torch.equal(zeroed.float(), expected)
    lines = unread_lines(program, plan, dispfx.gated(program, plan))
    assert all(line.holds for line in lines)
