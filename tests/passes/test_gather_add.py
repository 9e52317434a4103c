"""gather-add: a write is a gather from the branch's output and a zero, not a scatter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.gather_add import GatherAdd
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from tests.one_branch import VOCABULARY, WIDTH, Middle, one_branch
from tests.passes.golden import calls_of, lines_of, names_of
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids

WRITE = [0, 7, 8]


def lowered(program: Program, write: list[int]) -> Program:
    selections = {
        site.name: torch.tensor(write if site.kind == "write" else range(site.size), dtype=torch.int32)
        for site in program.sites
    }
    return Pipeline([InsertGates(), LowerGates(selections)]).run(program.clone())


@pytest.fixture(scope="module")
def plain() -> Program:
    return dispfx.capture(one_branch(lambda: Middle(lambda m, h: F.gelu(h))))


def test_a_scatter_becomes_a_gather_from_a_widened_projection(plain: Program):
    program = lowered(plain, WRITE)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    assert "index_add(" in calls_of(program, "index_add")
    Pipeline([GatherAdd()]).run(program)
    assert not calls_of(program, "index_add")
    assert lines_of(program, "linear_1") == (
        "  linear_1 = linear(gelu, mlp_down_weight, mlp_down_bias): (B, T, 8) float32"
    )
    assert calls_of(program, "index_select") == (
        "index_select(linear_1, 2, dispfx_inverse_mlp_write): (B, T, 16) float32"
    )
    assert "add(embedding, index_select_default" in calls_of(program, "add")
    # The same products and sums, but a wider projection may run in another kernel.
    assert relative_error(program.graph_module(ids), before) <= 1e-6


def test_the_inverse_points_pruned_features_at_the_first_zero(plain: Program):
    """Rule 1."""
    program = Pipeline([GatherAdd()]).run(lowered(plain, WRITE))
    tensors = dict(program.tensors())
    expected = [WRITE.index(i) if i in WRITE else len(WRITE) for i in range(WIDTH)]
    assert tensors["dispfx_inverse.mlp.write"].tolist() == expected
    assert "dispfx_index.mlp.write" not in tensors
    assert not tensors["mlp.down.weight"][len(WRITE) :].any() and not tensors["mlp.down.bias"][3:].any()
    assert torch.equal(tensors["mlp.down.weight"][:3], plain.parameters["mlp.down.weight"][WRITE])


@pytest.mark.parametrize(
    ("kept", "multiple", "rows"), [(3, 8, 8), (8, 8, 16), (9, 8, 16), (3, 1, 4), (8, 1, 9)]
)
def test_there_is_always_a_zero_row_and_rows_are_a_multiple(
    plain: Program, kept: int, multiple: int, rows: int
):
    """Rule 2."""
    program = lowered(plain, list(range(kept)))
    Pipeline([GatherAdd(row_multiple=multiple)]).run(program)
    assert program.shapes["mlp.down.weight"] == (rows, 24)


def test_a_write_among_zeros_becomes_the_gather_alone():
    """Rule 3."""
    program = lowered(dispfx.capture(build(FORMS["parallel-one-add"], layers=1)), WRITE)
    ids = token_ids(2, 9)
    before = program.graph_module(ids)
    Pipeline([GatherAdd()]).run(program)
    assert not calls_of(program, "new_zeros") and not calls_of(program, "index_add")
    assert "add(index_select_default" in calls_of(program, "add")
    assert program.shapes["layers.0.attention.out.weight"] == (8, 32), "widened, not padded"
    assert relative_error(program.graph_module(ids), before) <= 1e-6


class Twice(nn.Module):
    """A projection whose value is used again, and one behind an activation."""

    def __init__(self):
        super().__init__()
        self.body = Middle(lambda m, h: F.gelu(h))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def test_what_is_no_projection_is_padded_by_one_column():
    """Rule 2."""
    program = lowered(dispfx.capture(one_branch(Twice)), WRITE)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    Pipeline([GatherAdd()]).run(program)
    assert calls_of(program, "constant_pad_nd").startswith("constant_pad_nd(tanh, [0, 1])")
    assert program.shapes["mlp.body.down.weight"] == (3, 24), "the projection itself is left alone"
    assert torch.equal(program.graph_module(ids), before)


class Shared(nn.Module):
    """Two layers with one projection: rows added for one would be rows of the other."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mlp(x)
        return self.head(x + self.mlp(x))


def test_a_projection_that_others_use_is_left_alone():
    """Rule 2."""
    torch.manual_seed(0)
    program = lowered(dispfx.capture(Shared()), WRITE)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    Pipeline([GatherAdd()]).run(program)
    assert program.shapes["mlp.down.weight"] == (3, 24)
    assert calls_of(program, "constant_pad_nd").count("constant_pad_nd(") == 2
    assert relative_error(program.graph_module(ids), before) == 0.0


def test_a_program_without_writes_is_left_alone(plain: Program):
    program = lowered(plain, list(range(WIDTH)))
    names = names_of(program)
    pipeline = Pipeline([GatherAdd()])
    pipeline.run(program)
    assert not pipeline.ran[0].result.changed and names_of(program) == names


def test_a_second_run_changes_nothing(plain: Program):
    pipeline = Pipeline([GatherAdd(), GatherAdd()])
    pipeline.run(lowered(plain, WRITE))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
