"""The specification of a valid program catches what a pass could do wrong at each level."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dispfx
from dispfx.ir.ops import aten
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.ir.spec import LEVELS, verify_program
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from dispfx.plan.plan import Plan
from tests.one_branch import Middle, one_branch


@pytest.fixture(scope="module")
def levels() -> dict[str, Program]:
    canonical = dispfx.capture(one_branch(lambda: Middle(lambda m, h: F.gelu(h))))
    gated = Pipeline([InsertGates()]).run(canonical.clone())
    lowered = Pipeline([LowerGates(Plan.random(canonical, 0.4, 0).kept)]).run(gated.clone())
    return {"canonical": canonical, "gated": gated, "lowered": lowered}


@pytest.mark.parametrize("level", ["canonical", "gated", "lowered"])
def test_what_the_passes_make_is_valid(levels: dict[str, Program], level: str):
    assert levels[level].level == level and level in LEVELS
    assert verify_program(levels[level]) is None


def in_place(program: Program) -> None:
    node = program.node("add")
    node.target = aten.add_.Tensor


def second_read(program: Program) -> None:
    with program.graph.inserting_before(program.node("linear_2")):
        twin = program.graph.create_node("get_attr", "head.weight")
    twin.meta = dict(program.node("head_weight").meta)
    program.node("linear_2").update_arg(1, twin)


def stale_write(program: Program) -> None:
    assert program.stream is not None
    program.stream = replace(program.stream, writes=("gone",))


def stale_gate(program: Program) -> None:
    site = program.sites[0]
    program.sites = (replace(site, gates=(replace(site.gates[0], value="gone"),)), *program.sites[1:])


def gate_on_weight(program: Program) -> None:
    program.node("gate_0_0").update_arg(0, program.node("mlp_up_weight"))


def gate_on_no_dimension(program: Program) -> None:
    program.node("gate_0_0").update_arg(2, 3)


def gate_missing(program: Program) -> None:
    gate = program.node("gate_0_0")
    gate.replace_all_uses_with(gate.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(gate)


def mask_missing(program: Program) -> None:
    program.sites = program.sites[:-1]


def left_over_gate(program: Program) -> None:
    from dispfx.ir.gate import GATE

    node = program.node("gelu")
    with program.graph.inserting_after(node):
        gate = program.graph.call_function(GATE, (node, program.node("mlp_up_bias"), 2))
    gate.meta = dict(node.meta)


def index_out_of_range(program: Program) -> None:
    dict(program.tensors())["dispfx_index.mlp.read"][-1] = 16


BROKEN: list[tuple[str, Callable[[Program], None], str]] = [
    ("canonical", in_place, "add changes its operand in place"),
    ("canonical", second_read, "head.weight is read by two nodes"),
    ("canonical", stale_write, "a fact names gone, which is not in the graph"),
    ("canonical", stale_gate, "a fact names gone, which is not in the graph"),
    ("gated", gate_on_weight, "gate_0_0 does not stand on an activation"),
    ("gated", gate_on_no_dimension, "gate_0_0 gates dimension 3 of embedding"),
    ("gated", gate_missing, "gates were expected"),
    ("gated", mask_missing, r"a gated program has 3 input"),
    ("lowered", left_over_gate, "is a gate in a lowered program"),
    ("lowered", index_out_of_range, "takes positions of dispfx_index.mlp.read"),
]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own, a parameter where it was one."""
    twin = tensor.detach().clone()
    return torch.nn.Parameter(twin, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else twin


@pytest.mark.parametrize(("level", "act", "problem"), BROKEN, ids=[act.__name__ for _, act, _ in BROKEN])
def test_what_is_broken_is_said(levels: dict[str, Program], level: str, act, problem: str):
    program = levels[level].clone()
    program.rebuild({path: copied(tensor) for path, tensor in program.tensors()})
    act(program)
    found = verify_program(program)
    assert found is not None and problem in found


def test_a_clone_shares_tensors_and_not_the_graph(levels: dict[str, Program]):
    program = levels["canonical"]
    twin = program.clone()
    twin.graph.erase_node(twin.graph.output_node())
    assert verify_program(program) is None
    assert twin.parameters["head.weight"] is program.parameters["head.weight"]


def test_a_rebuild_drops_what_nobody_reads(levels: dict[str, Program]):
    twin = levels["canonical"].clone()
    twin.node("linear_2").update_arg(1, twin.node("embedding_weight"))
    twin.rebuild({**dict(twin.tensors()), "unread": torch.zeros(1)})
    assert "head.weight" not in {str(node.target) for node in twin.graph.nodes}
