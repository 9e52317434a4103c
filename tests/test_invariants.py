"""The invariants that make this a compiler, on decoders of every arrangement."""

import hashlib

import pytest
import torch
from torch import nn

import dispfx
from dispfx.analysis.coverage import coverage
from dispfx.ir.ops import tensors_read
from dispfx.ir.program import Program
from dispfx.plan.hardening import hard_masks
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.plan import Plan
from dispfx.verification.equivalence import ModuleDecoder
from dispfx.verification.graphs import zeroed_tensors
from tests.plain_decoders import FORMS, build
from tests.programs import program_of, relative_error, token_ids

# Sums over fewer features run in another order in float32: 2⁻²³ a step, a few hundred steps.
ORDER_OF_SUMS = 1e-5
UNTRACED = ((2, 9), (1, 17), (4, 5))


@pytest.fixture(scope="module", params=sorted(FORMS))
def case(request) -> tuple[nn.Module, Program]:
    """A decoder in plain torch and its program."""
    model = build(FORMS[request.param])
    return model, dispfx.capture(model)


def test_gates_of_ones_are_bit_identical_to_the_original(case):
    model, program = case
    gated = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
    for shape in UNTRACED:
        ids = token_ids(*shape)
        assert torch.equal(gated(ids), program.graph_module(ids))
        assert relative_error(gated(ids), model(ids)) <= 1e-6


def test_lowered_equals_hard_gated_at_untraced_shapes(case):
    _, program = case
    for seed in range(3):
        plan = Plan.random(program, 0.4, seed)
        gated, lowered = dispfx.gated(program, plan), dispfx.lower(program, plan)
        for shape in UNTRACED:
            ids = token_ids(*shape)
            assert relative_error(lowered(ids), gated(ids)) <= ORDER_OF_SUMS


def test_lowered_equals_the_users_module_with_removed_weights_set_to_zero(case):
    model, program = case
    plan = Plan.random(program, 0.5, seed=3)
    zeroed = ModuleDecoder(model, zeroed_tensors(program, plan))
    ids = token_ids(3, 11)
    with torch.no_grad():
        assert relative_error(dispfx.lower(program, plan)(ids), zeroed(ids)) <= ORDER_OF_SUMS
        assert relative_error(zeroed(ids), model(ids)) > 1e-3, "the plan must remove something that matters"


def test_gather_add_gives_the_values_of_index_add(case):
    _, program = case
    plan = Plan.random(program, 0.5, seed=4)
    ids = token_ids(2, 9)
    scattered, gathered = (
        dispfx.lower(program, plan, write=write)(ids) for write in ("index-add", "gather-add")
    )
    assert relative_error(gathered, scattered) <= ORDER_OF_SUMS


def test_a_full_selection_lowers_to_nothing(case):
    _, program = case
    lowered = dispfx.lower(program, Plan.random(program, 0.0, seed=0))
    calls = {str(node.target) for node in lowered.graph.nodes if node.op == "call_function"}
    assert not any(word in call for call in calls for word in ("index_select", "index_add", "dispfx"))
    assert len(lowered.graph.nodes) == len(program.graph.nodes)
    ids = token_ids(2, 9)
    assert torch.equal(lowered(ids), program.graph_module(ids))


def test_the_count_of_a_plan_is_the_count_of_the_lowered_tensors(case):
    _, program = case
    plan = Plan.random(program, 0.35, seed=5)
    lowered = dispfx.lower(program, plan)
    shapes = {path: tuple(tensor.shape) for path, tensor in lowered.named_parameters()}
    cut = {piece.parameter for site in program.sites for piece in site.slices}
    count = ParameterCount.of_sites(program.sites, program.shapes, "blocks")
    masks = hard_masks(program.sites, plan.for_sites(program.sites))
    assert count.count_kept(masks) == sum(torch.Size(shapes[path]).numel() for path in cut)
    assert abs(plan.achieved - 0.35) <= 1e-3


def test_capture_and_lowering_leave_the_users_module_alone(case):
    model, program = case
    before = _digest(model)
    model.train()
    plan = Plan.random(dispfx.capture(model), 0.5, seed=6)
    dispfx.lower(program, plan, write="gather-add")(token_ids(2, 9))
    assert model.training and all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.eval()
    assert _digest(model) == before


@pytest.mark.parametrize("kept", [1, 7, 31])
def test_odd_widths_lower_as_well_as_even_ones(kept: int):
    program = program_of("pre-norm")
    selections = [torch.arange(min(kept, site.size), dtype=torch.int32) for site in program.sites]
    plan = Plan.of(program, Plan.random(program, 0.0, 0).budget, selections, seed=0)
    gated, ids = dispfx.gated(program, plan), token_ids(2, 9)
    for write in ("index-add", "gather-add"):
        assert relative_error(dispfx.lower(program, plan, write=write)(ids), gated(ids)) <= ORDER_OF_SUMS


def test_every_form_offers_the_papers_five_selections_a_layer(case):
    _, program = case
    symbols = sorted(site.symbol for site in program.sites)
    assert symbols == ["S1", "S1", "S2", "S2", "S3", "S3", "S4", "S4", "S5", "S5"]
    assert not program.refused


def test_every_weight_of_a_layer_is_cut(case):
    _, program = case
    found = coverage(program)
    weights = {path for path, shape in program.shapes.items() if len(shape) == 2}
    products = {
        path for leaf in program.leaves for name in leaf.nodes for path in tensors_read(program.node(name))
    }
    assert found.total == sum(program.parameters[path].numel() for path in weights & products) > 0
    assert found.gated == found.total and not found.ungated


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for path, tensor in model.state_dict().items():
        digest.update(path.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()
