"""Printed programs: one line a value, and a number that changes with everything that matters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dispfx
from dispfx.ir.printer import print_program, signature
from dispfx.ir.program import Program
from tests.one_branch import INNER, Middle, one_branch


@pytest.fixture(scope="module")
def program() -> Program:
    def middle(m: Middle, h: torch.Tensor) -> torch.Tensor:
        a, b = h.flatten(0, 1).chunk(2, dim=-1)
        return (F.silu(a) * b).view(*h.shape[:-1], INNER)

    return dispfx.capture(one_branch(lambda: Middle(middle, up=2 * INNER, bias=False)))


def test_a_program_prints_one_line_a_value(program: Program):
    lines = print_program(program).splitlines()
    assert lines[0] == "tests.one_branch.OneBranch (canonical)"
    assert len(lines) == 1 + len(program.graph.nodes)
    for line in (
        "  input_ids: input: (B, T) int64",
        "  mlp_up_weight = mlp.up.weight: (48, 16) float32",
        "* embedding = embedding(embedding_weight, input_ids): (B, T, 16) float32",
        "  linear = linear(embedding, mlp_up_weight): (B, T, 48) float32",
        "  flatten = flatten(linear, 0, 1): (?, 48) float32",
        "  chunk = chunk(flatten, 2, -1)",
        "  getitem = getitem(chunk, 0): (?, 24) float32",
        "* add = add(embedding, linear_1): (B, T, 16) float32",
        "  return linear_2",
    ):
        assert line in lines, line


def test_keywords_and_lists_are_printed(program: Program):
    twin = program.clone()
    node = twin.node("add")
    node.kwargs = {"alpha": 2}
    assert "add(embedding, linear_1, alpha=2)" in print_program(twin)


def test_the_signature_is_the_same_for_a_copy(program: Program):
    assert signature(program.clone()) == signature(program)


def change_argument(twin: Program) -> None:
    twin.node("chunk").update_arg(2, 1)


def change_keyword(twin: Program) -> None:
    twin.node("add").kwargs = {"alpha": 2}


def change_tensor(twin: Program) -> None:
    twin.graph_module.get_submodule("head").weight = torch.nn.Parameter(torch.zeros(5, 16))


def change_site(twin: Program) -> None:
    twin.sites = twin.sites[:-1]


def change_gate(twin: Program) -> None:
    twin.sites = (replace(twin.sites[0], gates=()), *twin.sites[1:])


def change_refusal(twin: Program) -> None:
    from dispfx.ir.sites import Refusal

    twin.refused = (*twin.refused, Refusal("a", "b"))


def change_leaf(twin: Program) -> None:
    twin.leaves = ()


@pytest.mark.parametrize(
    "change",
    [change_argument, change_keyword, change_tensor, change_site, change_gate, change_refusal, change_leaf],
)
def test_the_signature_sees_every_change(program: Program, change):
    twin = program.clone()
    change(twin)
    assert signature(twin) != signature(program)
