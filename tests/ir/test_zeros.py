"""What a branch writes is zero where its weights are, or the write is refused by name."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from tests.one_branch import WIDTH, Middle, one_branch, require_one_function

Ending = Callable[["Ended", Tensor], Tensor]


class Ended(nn.Module):
    """An MLP with something behind it: `ending(down(gelu(up(x))))`."""

    def __init__(self, ending: Ending):
        super().__init__()
        self.middle = Middle(lambda m, h: F.gelu(h))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self, self.middle(x))


def normed(m: Ended, y: Tensor) -> Tensor:
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * m.scale


def centred(m: Ended, y: Tensor) -> Tensor:
    """A layer norm in small steps: its variance sees what the mean makes of a zero."""
    apart = y - y.mean(-1, keepdim=True)
    return apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + 1e-5) * m.scale


ZERO: dict[str, Ending] = {
    "nothing": lambda m, y: y,
    "tanh": lambda m, y: y.tanh(),
    "clamp around zero": lambda m, y: y.clamp(-0.5, 0.5),
    "scale": lambda m, y: y * m.scale,
    "bias": lambda m, y: y + m.scale,
    "a gate on itself": lambda m, y: y.sigmoid() * y,
    "a gate that is not zero": lambda m, y: (y + 2.0) * y,
    "a norm": normed,
    "a learned power": lambda m, y: y.relu().pow(m.scale.abs().mean()),
    "half precision": lambda m, y: y.bfloat16().float(),
    "in two parts": lambda m, y: torch.cat([y[..., : WIDTH // 2] * 2, y[..., WIDTH // 2 :].relu()], -1),
}
# Ending -> the operation that is to blame.
NOT_ZERO: dict[str, tuple[Ending, str]] = {
    "sigmoid": (lambda m, y: y.sigmoid(), "aten.sigmoid"),
    "exp": (lambda m, y: y.exp(), "aten.exp"),
    "cos": (lambda m, y: y.cos() * 2, "aten.cos"),
    "softplus": (lambda m, y: F.softplus(y), "aten.softplus"),
    "the smaller of it and a number below zero": (
        lambda m, y: torch.minimum(y, -0.05 * m.scale.abs().mean()),
        "aten.minimum",
    ),
    "a constant": (lambda m, y: (y + 1.0).tanh(), "aten.add"),
    "a constant less": (lambda m, y: 1.0 - y, "aten.rsub"),
    "clamp above zero": (lambda m, y: y.clamp(min=0.5), "aten.clamp"),
    "another value where it is small": (lambda m, y: y.masked_fill(y < 0.1, -3.0), "aten.masked_fill"),
    "a layer norm in small steps": (centred, "aten.sub"),
}


@pytest.mark.parametrize("name", ZERO)
def test_a_branch_that_keeps_zeros_is_cut_where_it_writes(name: str):
    """Rules 1, 2 and 3 of zero_values."""
    model = one_branch(lambda: Ended(ZERO[name]))
    program = dispfx.capture(model)
    assert not program.refused
    assert {site.kind for site in program.sites} == {"read", "inner", "write"}
    if name != "half precision":
        require_one_function(model, program)


@pytest.mark.parametrize("name", NOT_ZERO)
def test_a_branch_that_makes_something_of_a_zero_is_refused_where_it_writes(name: str):
    """Rule 3 of zero_values, and rule 5 of find_sites."""
    ending, operation = NOT_ZERO[name]
    model = one_branch(lambda: Ended(ending))
    program = dispfx.capture(model)
    (refusal,) = program.refused
    assert refusal.name == "mlp.middle.write"
    assert refusal.reason.startswith(f"{operation} of zero is not zero")
    assert refusal.parameter == "mlp.middle.down.weight"
    assert refusal.source is not None and "test_zeros.py:" in refusal.source
    assert {site.kind for site in program.sites} == {"read", "inner"}
    require_one_function(model, program, ratio=0.3)


def test_a_mean_of_features_that_are_not_zero_refuses_their_cut():
    """The removed features of cos(up(x)) are ones, of which the mean would keep a share."""
    model = one_branch(lambda: Middle(lambda m, h: h.cos() * h.cos().mean(-1, keepdim=True)))
    program = dispfx.capture(model)
    (refusal,) = program.refused
    assert refusal.name == "mlp.inner" and refusal.reason.startswith("aten.cos of zero is not zero")
    require_one_function(model, program, ratio=0.31)


def test_features_that_only_a_product_takes_need_not_be_zero():
    """Its columns are: cos(0) · 0 = 0."""
    model = one_branch(lambda: Middle(lambda m, h: h.cos()))
    program = dispfx.capture(model)
    assert not program.refused
    require_one_function(model, program)
