"""lower-gates: reads become index_select, writes index_add, and what is cut itself needs no operation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.errors import PassError
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch
from tests.passes.golden import calls_of, lines_of, names_of
from tests.plain_decoders import FORMS, build
from tests.programs import plan_keeping, relative_error, token_ids

READ, INSIDE, WRITE = [1, 4, 5, 9], [0, 2, 3, 11, 23], [0, 7, 8]


def middle_program(middle: Callable[[Middle, Tensor], Tensor], up: int = INNER) -> Program:
    return dispfx.capture(one_branch(lambda: Middle(middle, up=up)))


@pytest.fixture(scope="module")
def plain() -> Program:
    return middle_program(lambda m, h: F.gelu(h))


def lowered(program: Program, **kept: list[int]) -> Program:
    """Lower with the named kinds of site narrowed and the others whole."""
    selections = {
        site.name: torch.tensor(kept.get(site.kind, list(range(site.size))), dtype=torch.int32)
        for site in program.sites
    }
    return Pipeline([InsertGates(), LowerGates(selections)]).run(program.clone())


def require_equal_to_gated(program: Program, small: Program, **kept: list[int]) -> None:
    names = {site.name: kept[site.kind] for site in program.sites if site.kind in kept}
    gated = dispfx.gated(program, plan_keeping(program, names))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert relative_error(small.graph_module(ids), gated(ids)) <= 1e-6


def test_a_read_selects_columns_and_a_write_adds_rows(plain: Program):
    """Rules 2, 3 and 4."""
    program = lowered(plain, read=READ, inner=INSIDE, write=WRITE)
    assert calls_of(program, "index_select") == (
        "index_select(embedding, 2, dispfx_index_mlp_read): (B, T, 4) float32"
    )
    assert lines_of(program, "linear", "gelu", "linear_1") == (
        "  linear = linear(index_select_default, mlp_up_weight, mlp_up_bias): (B, T, 5) float32\n"
        "  gelu = gelu(linear): (B, T, 5) float32\n"
        "  linear_1 = linear(gelu, mlp_down_weight, mlp_down_bias): (B, T, 3) float32"
    )
    assert calls_of(program, "index_add") == (
        "index_add(embedding, 2, dispfx_index_mlp_write, linear_1): (B, T, 16) float32"
    )
    tensors = dict(program.tensors())
    assert tensors["dispfx_index.mlp.read"].tolist() == READ
    assert tensors["dispfx_index.mlp.write"].tolist() == WRITE
    assert "dispfx_index.mlp.inner" not in tensors, "an inner selection needs no index"
    require_equal_to_gated(plain, program, read=READ, inner=INSIDE, write=WRITE)


def test_weights_are_cut_along_both_axes(plain: Program):
    """Rule 5."""
    program = lowered(plain, read=READ, inner=INSIDE, write=WRITE)
    dense, small = plain.parameters, program.parameters
    assert torch.equal(small["mlp.up.weight"], dense["mlp.up.weight"][INSIDE][:, READ])
    assert torch.equal(small["mlp.up.bias"], dense["mlp.up.bias"][INSIDE])
    assert torch.equal(small["mlp.down.weight"], dense["mlp.down.weight"][WRITE][:, INSIDE])
    assert torch.equal(small["mlp.down.bias"], dense["mlp.down.bias"][WRITE])
    assert small["embedding.weight"].data_ptr() == dense["embedding.weight"].data_ptr(), "shared, not copied"


def test_a_whole_site_lowers_to_nothing_beside_a_narrow_one(plain: Program):
    """Rule 1."""
    program = lowered(plain, inner=INSIDE)
    assert not calls_of(program, "index_select") and not calls_of(program, "index_add")
    assert lines_of(program, "linear", "add") == (
        "  linear = linear(embedding, mlp_up_weight, mlp_up_bias): (B, T, 5) float32\n"
        "* add = add(embedding, linear_1): (B, T, 16) float32"
    )
    assert names_of(program) == names_of(plain)


def test_a_write_that_is_summed_first_is_put_among_zeros():
    """Rule 4."""
    program = dispfx.capture(build(FORMS["parallel-one-add"], layers=1))
    small = lowered(program, write=WRITE)
    assert calls_of(small, "new_zeros").count("32]): (B, T, 32) float32") == 2
    assert calls_of(small, "index_add").replace("layers_0_", "") == (
        "index_add(new_zeros_default, 2, dispfx_index_attention_write, linear_3): (B, T, 32) float32\n"
        "index_add(new_zeros_default_1, 2, dispfx_index_mlp_write, linear_5): (B, T, 32) float32"
    )
    gated = dispfx.gated(
        program, plan_keeping(program, {site.name: WRITE for site in program.sites if site.kind == "write"})
    )
    ids = token_ids(2, 9)
    assert relative_error(small.graph_module(ids), gated(ids)) <= 1e-6


class TwoInner(nn.Module):
    """One weight whose rows belong to two inner sites."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER)
        self.first, self.second = nn.Linear(INNER, WIDTH), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.gelu(self.up(x)).chunk(2, -1)
        return self.first(one) + self.second(other)


def test_a_position_stays_if_every_site_that_labels_it_keeps_its_feature():
    """Rule 5."""
    program = dispfx.capture(one_branch(TwoInner))
    one, other = (site.name for site in program.sites if site.kind == "inner")
    plan = plan_keeping(program, {one: [0, 2], other: [1]})
    lowered, gated = dispfx.lower(program, plan), dispfx.gated(program, plan)
    assert torch.equal(
        lowered.get_parameter("mlp.up.weight"), program.parameters["mlp.up.weight"][[0, 2, INNER + 1]]
    )
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert relative_error(lowered(ids), gated(ids)) <= 1e-6


class ScaledAdd(nn.Module):
    """A residual addition that scales its operand: torch.add(x, y, alpha=0.5)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(torch.add(x, self.mlp(x), alpha=0.5))


def test_an_addition_that_scales_its_operand_keeps_its_scale():
    torch.manual_seed(0)
    program = dispfx.capture(ScaledAdd())
    small = lowered(program, write=WRITE)
    assert "alpha=0.5" in lines_of(small, "add")
    require_equal_to_gated(program, small, write=WRITE)


REWRITTEN: dict[str, tuple[Callable[[Middle, Tensor], Tensor], int, tuple[str, str]]] = {
    "chunk": (
        lambda m, h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        2 * INNER,
        ("split_with_sizes", "split_with_sizes(linear, [5, 5], 2)"),
    ),
    "slice": (
        lambda m, h: F.silu(h[..., :INNER]) * h[..., INNER:],
        2 * INNER,
        ("slice", "slice(linear, 2, 5, 10, 1): (B, T, 5) float32"),
    ),
    "slice with a step": (
        lambda m, h: F.silu(h[..., ::2]) * h[..., 1::2],
        2 * INNER,
        ("slice", "slice(linear, 2, 1, 10, 2): (B, T, 5) float32"),
    ),
    "unflatten": (
        lambda m, h: h.unflatten(-1, (2, INNER)).amax(-2),
        2 * INNER,
        ("unflatten", "unflatten(linear, -1, [2, 5]): (B, T, 2, 5) float32"),
    ),
    "reshape": (
        lambda m, h: h.reshape(-1, INNER).relu().view(h.shape),
        INNER,
        ("reshape", "reshape(linear, [-1, 5]): (?, 5) float32"),
    ),
    "mean": (
        lambda m, h: h - h.mean(-1, keepdim=True),
        INNER,
        ("sum", "sum(linear, [2], True): (B, T, 1) float32"),
    ),
}


@pytest.mark.parametrize("name", sorted(REWRITTEN))
def test_sizes_in_the_graph_are_counted_anew(name: str):
    """Rule 6, and rules 1 and 2 of cut_sizes."""
    middle, up, (operation, expected) = REWRITTEN[name]
    program = middle_program(middle, up)
    small = lowered(program, inner=INSIDE)
    assert expected in calls_of(small, operation).splitlines()
    require_equal_to_gated(program, small, inner=INSIDE)


def test_a_mean_divides_by_the_full_size():
    """Rule 4 of cut_sizes."""
    program = middle_program(REWRITTEN["mean"][0])
    assert "div(mean, 24)" in calls_of(lowered(program, inner=INSIDE), "div")


def test_a_slice_whose_kept_features_lie_unevenly_is_selected_by_index():
    """Every second feature is used: with some of them gone, what is left has no common step.

    Rule 2 of cut_sizes.
    """
    program = middle_program(lambda m, h: h[..., ::2], up=2 * INNER)
    small = lowered(program, inner=[0, 1, 5])
    require_equal_to_gated(program, small, inner=[0, 1, 5])


def test_a_second_run_is_refused(plain: Program):
    program = lowered(plain, read=READ)
    selections = {site.name: torch.arange(site.size, dtype=torch.int32) for site in program.sites}
    with pytest.raises(PassError, match="needs a gated program, this one is lowered"):
        Pipeline([LowerGates(selections)]).run(program)


def test_the_dense_program_is_left_as_it_was(plain: Program):
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before, shapes = plain.graph_module(ids), plain.shapes
    lowered(plain, read=READ, inner=INSIDE, write=WRITE)
    assert torch.equal(plain.graph_module(ids), before) and plain.shapes == shapes
