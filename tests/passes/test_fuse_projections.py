"""fuse-projections: siblings of one value become one product."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.cached_inputs import CachedDecoder
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.fuse_projections import FuseProjections
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from dispfx.plan.plan import Plan
from tests.captures import lowered_with_cache
from tests.one_branch import INNER, VOCABULARY, WIDTH
from tests.passes.golden import calls_of, lines_of, names_of
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY as TINY_VOCABULARY

# The same sums, but a larger product may run in another kernel.
OTHER_KERNEL = 1e-6


def lowered(program: Program, ratio: float = 0.0, seed: int = 0) -> Program:
    """Return the lowered program of a random plan; everything is kept at ratio 0."""
    kept = Plan.random(program, ratio, seed).for_sites(program.sites)
    by_name = {site.name: indices for site, indices in zip(program.sites, kept, strict=True)}
    return Pipeline([InsertGates(), LowerGates(by_name)]).run(program.clone())


def fused(program: Program) -> Program:
    return Pipeline([FuseProjections()]).run(program.clone())


def test_query_key_and_value_become_one_product_and_so_do_gate_and_up():
    """Rule 1."""
    program = lowered(dispfx.capture(build(FORMS["pre-norm"], layers=1)))
    after = fused(program)
    assert [call.split(",")[1] for call in calls_of(after, "linear").splitlines()] == [
        " layers_0_attention_query_key_value_weight): (B",
        " layers_0_attention_out_weight): (B",
        " layers_0_mlp_gate_up_weight): (B",
        " layers_0_mlp_down_weight): (B",
        " head_weight): (B",
    ]
    assert calls_of(after, "split_with_sizes").splitlines() == [
        "split_with_sizes(linear_default, [32, 32, 32], 2)",
        "split_with_sizes(linear_default_1, [48, 48], 2)",
    ]
    assert (
        lines_of(after, "linear_1") == "  linear_1 = getitem(split_with_sizes_default, 1): (B, T, 32) float32"
    )
    ids = token_ids(2, 9)
    assert relative_error(after.graph_module(ids), program.graph_module(ids)) <= OTHER_KERNEL


def test_weights_are_held_once():
    """Rule 2."""
    before = lowered(dispfx.capture(build(FORMS["layer-norm-with-bias"], layers=1)))
    after = fused(before)
    weight = after.parameters["layers.0.attention.query_key_value.weight"]
    parts = [before.parameters[f"layers.0.attention.{name}.weight"] for name in ("query", "key", "value")]
    assert torch.equal(weight, torch.cat(parts))
    assert not any("attention.query.weight" in path for path, _ in after.tensors())
    assert sum(map(torch.numel, after.parameters.values())) == sum(
        map(torch.numel, before.parameters.values())
    )


@pytest.mark.parametrize(
    "form", ["pre-norm", "parallel-one-add", "parallel-two-adds", "layer-norm-with-bias"]
)
def test_every_form_computes_what_it_computed(form: str):
    captured = dispfx.capture(build(FORMS[form]))
    for ratio in (0.0, 0.4):
        program = lowered(captured, ratio)
        after = fused(program)
        for shape in ((2, 9), (1, 1)):
            ids = token_ids(*shape)
            assert relative_error(after.graph_module(ids), program.graph_module(ids)) <= OTHER_KERNEL


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "deepseek"))]
)
def test_pruned_decoders_with_a_cache_compute_what_they_computed(name: str):
    program = lowered_with_cache(name, 0.4)
    ids = token_ids(2, 9, vocabulary=TINY_VOCABULARY)
    after = fused(program)
    assert calls_of(after, "split_with_sizes").count("\n") > calls_of(program, "split_with_sizes").count("\n")
    for graph_ids in (ids, ids[:, :1]):
        actual = CachedDecoder(after.graph_module)(graph_ids)
        assert relative_error(actual, CachedDecoder(program.graph_module)(graph_ids)) <= OTHER_KERNEL


class Two(nn.Module):
    """down(middle(first, second)) of two projections, which a test applies as it likes."""

    def __init__(self, middle: Callable[["Two", Tensor], Tensor], *, biases: tuple[bool, bool]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, INNER, bias=biases[0])
        self.second = nn.Linear(WIDTH, INNER, bias=biases[1])
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.middle = middle

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(self.middle(self, x)))


def two(middle: Callable[[Two, Tensor], Tensor], biases: tuple[bool, bool] = (False, False)) -> Program:
    torch.manual_seed(0)
    return lowered(dispfx.capture(perturb(Two(middle, biases=biases))))


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True)])
def test_biases_come_along_and_missing_ones_are_zeros(biases: tuple[bool, bool]):
    """Rule 3."""
    program = two(lambda m, x: F.silu(m.first(x)) * m.second(x), biases)
    after = fused(program)
    bias = after.parameters["first_second.bias"]
    for given, name, part in zip(biases, ("first", "second"), bias.split(INNER), strict=True):
        assert torch.equal(part, program.parameters[f"{name}.bias"] if given else torch.zeros(INNER))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert relative_error(after.graph_module(ids), program.graph_module(ids)) <= OTHER_KERNEL


def shared_weight(m: Two, x: Tensor) -> Tensor:
    return F.silu(m.first(x)) * F.linear(x, m.first.weight)


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (lambda m, x: m.first(x) * m.second(torch.tanh(x)), "another value"),
        (lambda m, x: m.first(x) * m.second(x * 1.0), "an equal value, but not the same"),
        (shared_weight, "one weight for both"),
        (lambda m, x: m.first(x) * F.linear(x, m.second.weight * 2), "a weight that is computed"),
    ],
)
def test_what_is_no_pair_of_siblings_is_left_alone(middle: Callable[[Two, Tensor], Tensor], why: str):
    """Rule 1."""
    program = two(middle)
    names = names_of(program)
    pipeline = Pipeline([FuseProjections()])
    pipeline.run(program)
    assert not pipeline.ran[0].result.changed, why
    assert names_of(program) == names


def test_siblings_of_another_dtype_are_left_alone():
    """Rule 4."""
    program = two(lambda m, x: F.silu(m.first(x)) * m.second(x))
    assert FuseProjections().run(program.clone()).changed
    second = program.node("linear_1")
    second.meta["val"] = second.meta["val"].to(torch.bfloat16)
    assert not FuseProjections().run(program).changed


def test_the_original_program_keeps_its_weights():
    program = two(lambda m, x: F.silu(m.first(x)) * m.second(x))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    fused(program)
    assert torch.equal(program.graph_module(ids), before)


def test_a_second_run_changes_nothing():
    pipeline = Pipeline([FuseProjections(), FuseProjections()])
    pipeline.run(lowered(dispfx.capture(build(FORMS["pre-norm"]))))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
