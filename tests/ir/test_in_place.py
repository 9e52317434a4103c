"""Operations in place become plain ones where nobody else sees what they write, and only there."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dispfx
from dispfx.capturing.graph_export import traced
from dispfx.capturing.in_place import spell_in_place
from dispfx.ir.ops import mutates
from tests.test_zoo_smoke import build


class Module(nn.Module):
    def __init__(self, function: Callable[["Module", Tensor], Tensor]):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 6.0), requires_grad=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def written_after_a_view(m: Module, x: Tensor) -> Tensor:
    y = x + 1
    view = y[:, :2]
    y.mul_(2.0)
    return view + 0


def read_afterwards(m: Module, x: Tensor) -> Tensor:
    y = x + 1
    z = y.mul_(2.0)
    return z + y


def twice(m: Module, x: Tensor) -> Tensor:
    return (x + 1).mul_(m.weight).add_(3.0)


def normalised(m: Module, x: Tensor) -> Tensor:
    values, _ = x.topk(3, dim=-1)
    values /= values.sum(-1, keepdim=True)
    return values


def of_an_input(m: Module, x: Tensor) -> Tensor:
    return x.mul_(2.0) + 1


def of_a_view(m: Module, x: Tensor) -> Tensor:
    y = x + 1
    y[:, :2].mul_(2.0)
    return y


def of_a_part(m: Module, x: Tensor) -> Tensor:
    first, second = (x + 1).split([2, 3], dim=-1)
    return torch.cat([first.mul_(2.0), second], dim=-1)


def of_another_type(m: Module, x: Tensor) -> Tensor:
    return x.half().mul_(m.weight).float()


def by_positions(m: Module, x: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_(1, x.argmax(-1, keepdim=True), 1.0)


def of_a_view_of_its_own(m: Module, x: Tensor) -> Tensor:
    return (x @ torch.diag(m.weight)).unsqueeze(1).add_(1.0)


def of_what_may_be_its_operand(m: Module, x: Tensor) -> Tensor:
    y = x + 1
    z = torch.dropout(y, 0.5, train=False)
    z.mul_(2.0)
    return z * y


def rewritten(function: Callable[[Module, Tensor], Tensor]) -> tuple[bool, torch.fx.GraphModule]:
    exported = traced(Module(function), (torch.randn(3, 5),), ({0: Dim.AUTO},))
    done = spell_in_place(exported.graph)
    exported.graph.lint()
    return done, exported.module(check_guards=False)


@pytest.mark.parametrize("function", [twice, normalised, by_positions, of_a_view_of_its_own, read_afterwards])
def test_what_nobody_else_sees_is_computed_without_writing(function: Callable[[Module, Tensor], Tensor]):
    """Rule 1."""
    done, module = rewritten(function)
    assert done and not any(map(mutates, module.graph.nodes))
    x = torch.randn(7, 5)
    assert torch.equal(module(x.clone()), Module(function)(x.clone()))


@pytest.mark.parametrize(
    "function",
    [written_after_a_view, of_an_input, of_a_view, of_a_part, of_another_type],
)
def test_what_something_else_sees_is_left_alone(function: Callable[[Module, Tensor], Tensor]):
    """Rules 1, 2 and 3."""
    done, module = rewritten(function)
    assert not done and any(map(mutates, module.graph.nodes))
    x = torch.randn(7, 5)
    assert torch.equal(module(x.clone()), Module(function)(x.clone()))


def test_an_operation_that_may_return_its_operand_counts_as_a_view_of_it():
    exported = traced(Module(of_what_may_be_its_operand), (torch.randn(3, 5),), ({0: Dim.AUTO},))
    (sum_,) = (node for node in exported.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    # torch 2.14 notes by itself that both names are one tensor, and no other reader is left then.
    read_again = len(sum_.users) > 1
    done, module = rewritten(of_what_may_be_its_operand)
    assert done is not read_again and any(map(mutates, module.graph.nodes)) is read_again
    x = torch.randn(7, 5)
    assert torch.equal(module(x.clone()), Module(of_what_may_be_its_operand)(x.clone()))


def test_a_mixture_is_not_traced_a_second_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    # Grouped experts of older transformers clamp an index that is seen elsewhere.
    assert not dispfx.capture(build("mixture of experts"), experts="batched").refused
