"""A link rule registered from outside makes a decoder with an operation of its own prunable, exactly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.analysis import links
from dispfx.deploy.exported import load_program, save_graph
from dispfx.errors import DataError, DispfxError, VerificationError
from dispfx.plan.budget import Budget
from dispfx.run.rehearsal import rehearse
from dispfx.source import Source
from tests.programs import relative_error


@torch.library.custom_op("dispfx_tests::squash", mutates_args=())
def squash(x: Tensor, scale: float) -> Tensor:
    return x * torch.tanh(scale * x)


@torch.library.custom_op("dispfx_tests::shifted", mutates_args=())
def shifted(x: Tensor) -> Tensor:
    return x + 1.0


@torch.library.custom_op("dispfx_tests::reversed", mutates_args=())
def reversed_(x: Tensor) -> Tensor:
    return x.flip(-1)


@torch.library.custom_op("dispfx_tests::swapped", mutates_args=())
def swapped(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


squash.register_fake(lambda x, scale: torch.empty_like(x))
shifted.register_fake(lambda x: torch.empty_like(x))
reversed_.register_fake(lambda x: torch.empty_like(x))
swapped.register_fake(lambda x: torch.empty_like(x))
OWN: Any = torch.ops.dispfx_tests


class Decoder(nn.Module):
    """An MLP branch with operations of its own inside and on what it writes."""

    def __init__(self, inside: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor] = lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.inside, self.written = inside, written

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.written(self.down(self.inside(self.up(self.norm(x)))))
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(links, "_REGISTERED", {})
    yield


def test_an_operation_without_a_rule_is_refused_and_pruned_exactly_with_one():
    model = Decoder(lambda x: OWN.squash(x, 0.5))
    before = dispfx.capture(model)
    assert [site.kind for site in before.sites] == ["read", "write"]
    assert "no rule is known for dispfx_tests.squash" in before.refused[0].reason
    links.register(OWN.squash, links.pointwise)
    program = dispfx.capture(model)
    assert [site.kind for site in program.sites] == ["read", "inner", "write"] and not program.refused
    check_pruned(program)


def check_pruned(program: dispfx.Program) -> None:
    """Check that the lowered decoder is smaller and predicts as the gated one."""
    plan = dispfx.Plan.random(program, 0.4, seed=0)
    ids = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(0))
    lowered = dispfx.lower(program, plan)
    assert relative_error(lowered(ids), dispfx.gated(program, plan)(ids)) < 1e-6
    assert sum(tensor.numel() for tensor in lowered.parameters()) < program.size


def test_a_rule_of_three_lines_moves_features():
    def rule(node: Any) -> list[links.Connection]:
        x = node.args[0]
        size = x.meta["val"].shape[-1]
        ends = torch.arange(size).numpy()
        rows: list[links.Connection] = [links.Link((x, dim), (node, dim)) for dim in range(2)]
        return [*rows, links.Link((x, 2), (node, 2), ends, ends[::-1].copy())]

    links.register(OWN.reversed.default, rule)
    program = dispfx.capture(Decoder(OWN.reversed))
    assert program.site(program.branches[0].inner[0]).size == 24
    check_pruned(program)


def test_a_rule_that_holds_for_some_plans_only_is_named_before_learning():
    """Halves can be swapped among the kept features only where both keep equally many."""

    def rule(node: Any) -> list[links.Connection]:
        x, places = node.args[0], np.arange(24)
        rows: list[links.Connection] = [links.Link((x, dim), (node, dim)) for dim in range(2)]
        return [*rows, links.Link((x, 2), (node, 2), places, (places + 12) % 24)]

    links.register(OWN.swapped, rule)
    model: Any = Decoder(OWN.swapped).eval()
    source = Source(model, None, None, "decoder", "function")
    with pytest.raises(VerificationError) as raised:
        rehearse(source, dispfx.capture(model), Budget(0.5))
    assert "the link rule of dispfx_tests.swapped may be wrong" in str(raised.value.hint)


def test_an_operation_that_makes_something_of_zero_is_refused_where_a_branch_writes():
    links.register(OWN.shifted, links.pointwise)
    program = dispfx.capture(Decoder(torch.relu, OWN.shifted))
    assert [site.kind for site in program.sites] == ["read", "inner"]
    assert "dispfx_tests.shifted of zero is not zero" in program.refused[0].reason
    inside = dispfx.capture(Decoder(OWN.shifted))  # before a product the weight is cut as well
    assert [site.kind for site in inside.sites] == ["read", "inner", "write"]
    check_pruned(inside)


@pytest.mark.parametrize("operation", [torch.relu, "squash", torch.ops.dispfx_tests])
def test_what_is_no_operation_gets_no_rule(operation: Any):
    with pytest.raises(DispfxError, match="a link rule is for an operation"):
        links.register(operation, links.pointwise)


def test_a_rule_of_dispfx_cannot_be_replaced():
    with pytest.raises(DispfxError, match=r"aten\.linear has a built-in link rule"):
        links.register(torch.ops.aten.linear.default, links.pointwise)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda node: [links.Link((node.args[0], 3), (node, 3))], "does not exist: linear, 3"),
        (lambda node: [links.Mixing((node.args[7], 0))], "raised IndexError"),
        (lambda node: "pointwise", "raised TypeError: 'p' is no connection"),
        (lambda node: [("x", 0)], "is no connection, such as links.Link"),
        (
            lambda node: [links.Link((node.args[0], 2), (node, 2), *([[0, 1]] * 2))],  # type: ignore[arg-type]
            "two arrays of integers",
        ),
        (
            lambda node: [links.Link((node.args[0], 2), (node, 2), np.arange(3), np.arange(2))],
            "pairs 3 positions",
        ),
    ],
)
def test_a_wrong_rule_is_named(rule: Any, message: str):
    links.register(OWN.squash, rule)
    with pytest.raises(DispfxError, match=rf"the link rule of dispfx_tests\.squash .*{message}"):
        dispfx.capture(Decoder(lambda x: OWN.squash(x, 0.5)))


def test_a_written_graph_has_only_operations_of_torch_and_those_with_a_rule(tmp_path: Path):
    links.register(OWN.squash, links.pointwise)
    model = Decoder(lambda x: OWN.squash(x, 0.5))
    program = dispfx.capture(model)
    lowered = dispfx.lower(program, dispfx.Plan.random(program, 0.4, seed=0))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    save_graph(lowered, tmp_path)
    assert torch.equal(load_program(tmp_path)(ids), lowered(ids))
    links._REGISTERED.clear()
    for use in (lambda: load_program(tmp_path), lambda: save_graph(lowered, tmp_path)):
        with pytest.raises(DataError, match=r"no link rule is registered for .*dispfx_tests\.squash"):
            use()
