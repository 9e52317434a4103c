"""The paper's width proposition as a property (arXiv 2410.11988, section 3).

Where every layer has to keep the same features, the stream itself becomes as narrow as the union of what
the layers need.  With a selection of its own for every read and write, the stream keeps its width, whatever
the selections are, and

1. the lowered decoder is the gated one, for arbitrary independent selections;
2. the size of a product depends on the selections of its own branch and on no other;
3. the features that a layer touches, read or written, may be any set: no selection restricts another.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dispfx
from dispfx.ir import ops
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from tests.plain_decoders import FORMS, WIDTH, build
from tests.programs import relative_error, token_ids

# A dozen products of up to 48 float32 features, summed in another order.
ORDER_OF_SUMS = 1e-5
IDS = token_ids(2, 7)

PROGRAMS: dict[str, Program] = {}


def program_of(form: str) -> Program:
    if form not in PROGRAMS:
        PROGRAMS[form] = dispfx.capture(build(FORMS[form]))
    return PROGRAMS[form]


@st.composite
def independent_selections(draw: st.DrawFn, program: Program) -> list[list[int]]:
    """Return a non-empty subset of every site's features, each drawn by itself."""
    return [
        sorted(draw(st.sets(st.integers(0, site.size - 1), min_size=1), label=site.name))
        for site in program.sites
    ]


def plan_of(program: Program, kept: list[list[int]]) -> Plan:
    tensors = [torch.tensor(indices, dtype=torch.int32) for indices in kept]
    return Plan.of(program, Budget(0.0), tensors, seed=0)


PROPERTY = settings(max_examples=12, deadline=None, derandomize=True)


@pytest.mark.parametrize("form", ["pre-norm", "parallel-one-add", "fused-gate-up"])
@PROPERTY
@given(data=st.data())
def test_any_independent_selections_lower_to_the_gated_decoder_at_full_width(form: str, data: st.DataObject):
    program = program_of(form)
    kept = data.draw(independent_selections(program))
    plan = plan_of(program, kept)
    lowered = dispfx.lower(program, plan)
    with torch.no_grad():
        assert relative_error(lowered(IDS), dispfx.gated(program, plan)(IDS)) <= ORDER_OF_SUMS
    assert widths_of_writes(lowered) == widths_of_writes(program.graph_module) == {WIDTH}


def widths_of_writes(module: torch.fx.GraphModule) -> set[int]:
    """Return the width of every value that has the stream's role: what `add` and `index_add` give."""
    roles = (ops.aten.add, ops.aten.index_add)
    values = [node for node in module.graph.nodes if ops.packet(node) in roles and ops.rank(node) == 3]
    return {ops.shape_of(node)[-1] for node in values if ops.shape_of(node)[-1] != 1}


@pytest.mark.parametrize("form", ["pre-norm", "parallel-one-add"])
@PROPERTY
@given(data=st.data())
def test_the_weights_of_a_branch_depend_on_its_own_selections_alone(form: str, data: st.DataObject):
    program = program_of(form)
    branch = data.draw(st.sampled_from(program.branches))
    first = data.draw(independent_selections(program), label="first")
    second = [
        mine if site.branch == branch.name else other
        for site, mine, other in zip(
            program.sites, first, data.draw(independent_selections(program), label="second"), strict=True
        )
    ]
    shapes = []
    for kept in (first, second):
        lowered = dispfx.lower(program, plan_of(program, kept))
        shapes.append({path: tuple(tensor.shape) for path, tensor in lowered.named_parameters()})
    own = {path for path in shapes[0] if path.startswith(f"{branch.name}.")}
    assert own and all(shapes[0][path] == shapes[1][path] for path in own)


@PROPERTY
@given(data=st.data())
def test_the_features_a_layer_touches_may_be_any_set(data: st.DataObject):
    """For every set there are selections of reads and writes that touch exactly that set in a layer."""
    program = program_of("pre-norm")
    touched = data.draw(st.sets(st.integers(0, WIDTH - 1), min_size=1))
    layer = data.draw(st.sampled_from(["layers.0", "layers.1"]))
    kept = data.draw(independent_selections(program))
    for index, site in enumerate(program.sites):
        if site.branch.startswith(layer) and site.kind in ("read", "write"):
            inside = sorted(touched & set(kept[index])) or [min(touched)]
            kept[index] = sorted(touched) if site.name == f"{layer}.attention.read" else inside
    lowered = dispfx.lower(program, plan_of(program, kept))
    indices = {
        name: set(t.tolist()) for name, t in lowered.named_buffers() if name.startswith("dispfx_index")
    }
    own = [found for name, found in indices.items() if f".{layer}." in name]
    assert set().union(*own) == touched or len(touched) == WIDTH
    with torch.no_grad():
        assert lowered(IDS).shape == program.graph_module(IDS).shape
