"""fuse-norms: write, norm and selection become one operation that computes the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.api.cached import CachedDecoder
from dispfx.api.programs import lower_program
from dispfx.ir.plan import Plan
from dispfx.ir.program import Program
from dispfx.kernels.norm_select import ADD_NORM_SELECT
from dispfx.passes.fuse_norms import FuseNorms
from dispfx.pipeline import Pipeline
from tests import plain_decoders
from tests.captures import lowered_with_cache
from tests.one_branch import VOCABULARY, WIDTH, Middle
from tests.passes.golden import calls_of, lines_of, names_of
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import plan_keeping, relative_error, token_ids
from tests.tiny_transformers import VOCABULARY as TINY_VOCABULARY
from tests.tiny_transformers import tiny_transformer

# Sums over the width in the same order, by the same operations.
ROUNDING = 1e-6


def lowered(model: nn.Module, ratio: float = 0.4) -> Program:
    program = dispfx.capture(model)
    return lower_program(program, Plan.random(program, ratio, seed=0), write="gather-add")


def fused(program: Program) -> Program:
    return Pipeline([FuseNorms()]).run(program.clone())


@pytest.mark.parametrize("form", ["plain-mlp", "layer-norm-with-bias", "parallel-two-adds"])
def test_norms_are_fused_with_what_is_added_and_selected(form: str):
    program = lowered(build(FORMS[form]))
    after = fused(program)
    ids = token_ids(2, 9)
    count = calls_of(after, "dispfx.add_norm_select").count("add_norm_select(")
    assert count == 4
    assert relative_error(after.graph_module(ids), program.graph_module(ids)) <= ROUNDING


def test_torchs_own_root_mean_square_is_fused_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_decoders, "RMSNorm", lambda: nn.RMSNorm(plain_decoders.WIDTH))
    program = lowered(build(FORMS["pre-norm"]))
    assert "rms_norm(" in calls_of(program, "rms_norm")
    after = fused(program)
    assert calls_of(after, "dispfx.add_norm_select").count("add_norm_select(") == 4
    ids = token_ids(2, 9)
    assert relative_error(after.graph_module(ids), program.graph_module(ids)) <= ROUNDING


def test_a_cached_decoder_computes_what_it_computed():
    program = lowered_with_cache("llama", 0.4)
    after = fused(program)
    calls = calls_of(after, "dispfx.add_norm_select").splitlines()
    assert len(calls) == 4
    assert calls[0].startswith("dispfx.add_norm_select(embedding, None, None, model_layers_0_input_layernorm")
    assert "(add_7, linear_6, dispfx_inverse_model_layers_0_mlp_write" in calls[2]
    assert lines_of(after, "add_7").startswith("* add_7 = getitem(add_norm_select"), "the stream goes on"
    ids = token_ids(2, 9, vocabulary=TINY_VOCABULARY)
    actual, expected = (CachedDecoder(one.graph_module)(ids) for one in (after, program))
    assert relative_error(actual, expected) <= ROUNDING


def test_bfloat16_is_rounded_where_the_graph_rounded_it():
    model = tiny_transformer("llama").to(torch.bfloat16)
    program = dispfx.capture(model)
    plain = lower_program(program, Plan.random(program, 0.4, seed=1), write="gather-add")
    after = fused(plain)
    assert calls_of(after, "dispfx.add_norm_select").count("add_norm_select(") == 4
    ids = token_ids(2, 9, vocabulary=TINY_VOCABULARY)
    assert torch.equal(after.graph_module(ids), plain.graph_module(ids))


class Decoder(nn.Module):
    """One branch behind a norm that a test writes."""

    def __init__(self, norm: Callable[["Decoder", Tensor], Tensor]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.norm = norm

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mlp(self.norm(self, x)))


def rms(d: Decoder, x: Tensor) -> Tensor:
    return d.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(
    ("norm", "count"),
    [
        (rms, 1),
        (lambda d, x: F.layer_norm(x, (WIDTH,), d.weight), 1),
        # The weight, scaled or shifted, is another value than a parameter.
        (lambda d, x: (1 + d.weight) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), 0),
        # Another mean, another power, another root.
        (lambda d, x: d.weight * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6)), 0),
        (lambda d, x: d.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)), 0),
        (lambda d, x: d.weight * (x * torch.rsqrt((2 * x).pow(2).mean(-1, keepdim=True) + 1e-6)), 0),
        (lambda d, x: d.weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), 0),
        (lambda d, x: F.layer_norm(x, (WIDTH,)), 0),
    ],
)
def test_norms_that_the_operation_computes_are_fused_and_others_left_alone(norm, count: int):
    torch.manual_seed(0)
    program = dispfx.capture(perturb(Decoder(norm)))
    reads = {site.name: [0, 3, 4, 9] for site in program.sites if site.kind == "read"}
    plain = lower_program(program, plan_keeping(program, reads), write="gather-add")
    names = names_of(plain)
    after = fused(plain)
    assert calls_of(after, "dispfx.add_norm_select").count("add_norm_select(") == count
    assert count or names_of(after) == names
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert relative_error(after.graph_module(ids), plain.graph_module(ids)) <= ROUNDING


def test_a_second_run_changes_nothing():
    pipeline = Pipeline([FuseNorms(), FuseNorms()])
    pipeline.run(lowered(build(FORMS["layer-norm-with-bias"])))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]


@pytest.mark.parametrize("kept", [[5], [0, 2, 15], list(range(16))])
@pytest.mark.parametrize("is_rms", [True, False])
def test_one_kept_index_some_and_all(kept: list[int], is_rms: bool):
    generator = torch.Generator().manual_seed(0)
    x, written = torch.randn(2, 3, 16, generator=generator), torch.randn(2, 3, 5, generator=generator)
    weight, inverse = torch.randn(16, generator=generator), torch.arange(16, dtype=torch.int32) % 5
    places = torch.full((16,), -1, dtype=torch.int32)
    places[kept] = torch.arange(len(kept), dtype=torch.int32)
    bias = None if is_rms else torch.randn(16, generator=generator)
    total, selected = ADD_NORM_SELECT(x, written, inverse, weight, bias, places, len(kept), 1e-5, is_rms)
    expected = x + written[..., inverse.long()]
    assert torch.equal(total, expected)
    normal = (
        F.rms_norm(expected, (16,), weight, 1e-5) if is_rms else F.layer_norm(expected, (16,), weight, bias)
    )
    assert relative_error(selected, normal[..., kept]) <= ROUNDING


def test_the_operation_follows_the_rules_of_torch():
    x, places = torch.randn(2, 3, 16), torch.arange(16, dtype=torch.int32)
    taken = (x, None, None, torch.ones(16), None, places, 16, 1e-5, True)
    torch.library.opcheck(ADD_NORM_SELECT, taken, test_utils=("test_schema", "test_faketensor"))
