"""insert-gates: a gate on the named edges, and on no other."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import dispfx
from dispfx.errors import PassError
from dispfx.ir import ops
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.passes.insert_gates import InsertGates
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch
from tests.passes.golden import calls_of, lines_of
from tests.programs import token_ids
from tests.stacked_experts import EXPERTS, all_of_them, decoder, in_runs, in_runs_of_unknown_numbers


@pytest.fixture(scope="module")
def plain() -> Program:
    return dispfx.capture(one_branch(lambda: Middle(lambda m, h: F.gelu(h))))


@pytest.fixture(scope="module")
def joined() -> Program:
    """Features at two strides, so that the mean's operand has labels that are not the identity."""

    def middle(m: Middle, h: torch.Tensor) -> torch.Tensor:
        paired = h - h.mean(-1, keepdim=True)
        return paired[..., ::2] * paired[..., 1::2]

    return dispfx.capture(one_branch(lambda: Middle(middle, up=2 * INNER)))


def gated(program: Program) -> Program:
    return Pipeline([InsertGates()]).run(program.clone())


def test_a_gate_stands_on_every_edge_of_a_site(plain: Program):
    """Rule 1."""
    assert lines_of(plain, "linear", "linear_1", "add") == (
        "  linear = linear(embedding, mlp_up_weight, mlp_up_bias): (B, T, 24) float32\n"
        "  linear_1 = linear(gelu, mlp_down_weight, mlp_down_bias): (B, T, 16) float32\n"
        "* add = add(embedding, linear_1): (B, T, 16) float32"
    )
    program = gated(plain)
    assert lines_of(program, "linear", "linear_1", "add", "gate_0_0", "gate_1_0", "gate_2_0") == (
        "  gate_0_0 = dispfx.gate(embedding, mask_0, 2): (B, T, 16) float32\n"
        "  linear = linear(gate_0_0, mlp_up_weight, mlp_up_bias): (B, T, 24) float32\n"
        "  gate_1_0 = dispfx.gate(gelu, mask_1, 2): (B, T, 24) float32\n"
        "  linear_1 = linear(gate_1_0, mlp_down_weight, mlp_down_bias): (B, T, 16) float32\n"
        "  gate_2_0 = dispfx.gate(linear_1, mask_2, 2): (B, T, 16) float32\n"
        "* add = add(embedding, gate_2_0): (B, T, 16) float32"
    )
    inputs = [line for line in lines_of(program, "input_ids", "mask_0", "mask_1", "mask_2").splitlines()]
    assert inputs == [
        "  input_ids: input: (B, T) int64",
        "  mask_0: input: (16) float32",
        "  mask_1: input: (24) float32",
        "  mask_2: input: (16) float32",
    ]


def test_other_users_keep_the_plain_value(plain: Program):
    """The residual addition takes the embedding itself, not what the branch reads of it. Rule 2."""
    program = gated(plain)
    assert program.node("add").args[0] is program.node("embedding")
    assert {user.name for user in program.node("embedding").users} == {"gate_0_0", "add"}


def test_a_mask_is_gathered_where_positions_share_features(joined: Program):
    """Rule 3."""
    program = gated(joined)
    site = next(site for site in program.sites if site.kind == "inner")
    labelled = [point for point in site.gates if point.labels is not None]
    assert [point.labels for point in labelled] == [tuple(i for i in range(INNER) for _ in range(2))]
    assert "index_select(constant_pad_nd" in calls_of(program, "index_select")


def numbers_of(site: Site) -> str:
    """Return the name of the value that says whose a position is."""
    (point,) = site.gates
    assert point.rows is not None and point.rows.value is not None
    return point.rows.value


def test_a_gate_of_experts_takes_the_expert_of_each_position():
    """Rule 4."""
    program = gated(dispfx.capture(decoder(in_runs)))
    (site,) = [site for site in program.sites if site.experts > 1]
    index = program.sites.index(site)
    numbers = numbers_of(site)
    assert lines_of(program, f"gate_{index}_0", f"mask_{index}") == (
        f"  mask_{index}: input: (32) float32\n"
        f"  gate_{index}_0 = dispfx.gate(relu, mask_{index}, 1, {numbers}): (?, 8) float32"
    )
    assert program.node(numbers).target is operator.getitem, "the sorted numbers of the experts"


def test_the_expert_of_a_position_is_counted_from_the_ends_of_the_runs():
    """Rule 4."""
    program = gated(dispfx.capture(decoder(in_runs_of_unknown_numbers)))
    text = calls_of(program, "searchsorted")
    ends = numbers_of(next(site for site in program.sites if site.experts > 1))
    assert text == f"searchsorted({ends}, arange_default, right=True): (?) int64"


def test_the_experts_of_a_stack_are_numbered_where_all_are_computed():
    program = gated(dispfx.capture(decoder(all_of_them)))
    gate = next(node for node in program.graph.nodes if ops.is_gate(node) and len(node.args) > 3)
    experts = gate.args[3]
    assert isinstance(experts, fx.Node) and experts.args == (EXPERTS,)


@pytest.mark.parametrize("name", ["plain", "joined"])
def test_ones_change_no_bit_and_zeros_leave_the_stream_alone(name: str, request):
    program: Program = request.getfixturevalue(name)
    module, ids = gated(program).graph_module, token_ids(2, 9, vocabulary=VOCABULARY)
    ones = [torch.ones(site.size) for site in program.sites]
    assert torch.equal(module(ids, *ones), program.graph_module(ids))
    zeros = [torch.zeros(site.size) for site in program.sites]
    x = program.parameters["embedding.weight"][ids]
    torch.testing.assert_close(module(ids, *zeros), x @ program.parameters["head.weight"].T)


def test_every_mask_gets_a_gradient_and_no_weight_does(joined: Program):
    masks = [torch.ones(site.size, requires_grad=True) for site in joined.sites]
    gated(joined).graph_module(token_ids(2, 9, vocabulary=VOCABULARY), *masks).square().sum().backward()
    assert all(mask.grad is not None and bool((mask.grad != 0).all()) for mask in masks)
    assert all(not weight.requires_grad for weight in joined.parameters.values())


def test_the_original_program_has_no_gate(plain: Program):
    gated(plain)
    assert not any(ops.is_gate(node) for node in plain.graph.nodes)
    assert plain.level == "canonical"


def test_a_second_run_is_refused(plain: Program):
    program = gated(plain)
    with pytest.raises(PassError, match="needs a canonical program, this one is gated"):
        Pipeline([InsertGates()]).run(program)


def test_the_width_of_a_mask_is_that_of_its_site(plain: Program):
    masks = [torch.ones(site.size) for site in plain.sites]
    masks[0] = torch.ones(WIDTH + 1)
    with pytest.raises(RuntimeError):
        gated(plain).graph_module(token_ids(2, 9, vocabulary=VOCABULARY), *masks)
