"""insert-scales: every kept feature is multiplied by a number, and the numbers fold into weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.compiler.pipelines import run_pipeline
from dispfx.compiler.programs import lower_program
from dispfx.compiler.scales import Scaled, insert_scales
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.ir.sites import STREAM
from dispfx.passes.insert_scales import SCALE_PREFIX, InsertScales
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY as SMALL
from tests.one_branch import Middle, one_branch
from tests.passes.golden import calls_of, lines_of
from tests.plain_decoders import FORMS
from tests.programs import program_of, relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer


def lowered(program: Program, ratio: float = 0.4) -> tuple[Program, dict[str, Tensor]]:
    plan = Plan.random(program, ratio, 3)
    kept = plan.for_sites(program.sites)
    by_site = {site.name: indices for site, indices in zip(program.sites, kept, strict=True)}
    return lower_program(program, plan), by_site


def drawn(scaled: Scaled) -> None:
    """Give every scale a value of its own."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for scale in scaled.scales.values():
            scale.uniform_(0.5, 1.5, generator=generator)


def folded_error(scaled: Scaled, ids: Tensor) -> float:
    beside = scaled.program.graph_module(ids)
    inside = torch.func.functional_call(scaled.lowered.graph_module, scaled.folded(), (ids,))
    assert not torch.allclose(beside, scaled.lowered.graph_module(ids), rtol=1e-2)
    return relative_error(inside, beside)


@pytest.fixture(scope="module")
def plain() -> Program:
    return dispfx.capture(one_branch(lambda: Middle(lambda m, h: torch.nn.functional.gelu(h))))


def test_reads_inner_features_and_writes_are_multiplied_and_ones_change_no_bit(plain: Program):
    """Rules 1, 2 and 5."""
    program, kept = lowered(plain)
    scaled = Pipeline([InsertScales(kept)]).run(program.clone())
    ids = token_ids(2, 9, vocabulary=SMALL)
    assert torch.equal(scaled.graph_module(ids), program.graph_module(ids))
    parameters = dict(scaled.graph_module.named_parameters())
    for site in plain.sites:
        scale = parameters[f"{SCALE_PREFIX}.{site.name}"]
        assert scale.dtype == torch.float32 and scale.tolist() == [1.0] * len(kept[site.name])
    assert calls_of(scaled, "mul").count("mul(") == 3
    assert "mul(index_select_default, view" in calls_of(scaled, "mul")
    assert "mul(gelu, view" in calls_of(scaled, "mul") and "mul(linear_1, view" in calls_of(scaled, "mul")
    assert scaled.level == "lowered" and not calls_of(program, "mul"), "the program itself stays as it is"


def test_a_second_run_would_scale_twice_and_is_not_made_by_a_pipeline(plain: Program):
    program, kept = lowered(plain)
    stage = run_pipeline("scale", program.clone(), kept=kept)
    alone = Pipeline([InsertScales(kept)]).run(program.clone())
    assert lines_of(stage, "linear_1") == lines_of(alone, "linear_1")


@pytest.mark.parametrize("form", FORMS)
def test_every_site_of_every_arrangement_has_scales_that_fold(form: str):
    """Rule 3: fused projections follow features by labels."""
    program, kept = lowered(program_of(form))
    scaled = insert_scales(program, kept)
    assert {fold.site for fold in scaled.folds} == {site.name for site in program.sites}
    drawn(scaled)
    assert folded_error(scaled, token_ids(2, 11)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral"])
def test_decoders_of_transformers_fold(name: str):
    """Rule 4: of a mixture of experts, the sites of the experts have none."""
    program, kept = lowered(dispfx.capture(tiny_transformer(name)))
    scaled = insert_scales(program, kept)
    left = {site.name for site in program.sites} - {fold.site for fold in scaled.folds}
    assert all(program.site(one).experts > 1 for one in left)
    assert bool(left) == (name == "mixtral")
    drawn(scaled)
    assert folded_error(scaled, token_ids(2, 11, vocabulary=VOCABULARY)) < 1e-5


@pytest.mark.parametrize("sites", [("attention-values",), ("heads", "attention-values")], ids="+".join)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_heads_and_values_have_scales_that_fold(name: str, sites: Any):
    """Rules 3 and 4: a head's number reaches the values that it keeps, and values behind heads have none."""
    program, kept = lowered(dispfx.capture(tiny_transformer(name), sites=sites))
    scaled = insert_scales(program, kept)
    left = {site.kind for site in program.sites} - {program.site(fold.site).kind for fold in scaled.folds}
    assert left == ({"values"} if "heads" in sites else set())
    drawn(scaled)
    assert folded_error(scaled, token_ids(2, 11, vocabulary=VOCABULARY)) < 1e-5


def test_one_selection_for_the_whole_stream_has_none():
    """Rule 4."""
    program, kept = lowered(dispfx.api.capture(tiny_transformer("llama"), select="before-norm"))
    scaled = insert_scales(program, kept)
    assert {site.name for site in program.sites} - {fold.site for fold in scaled.folds} == {STREAM}
    drawn(scaled)
    assert folded_error(scaled, token_ids(2, 11, vocabulary=VOCABULARY)) < 1e-5


class Squared(nn.Module):
    """Squares what it makes, so that no weight can take a scale of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) ** 2


def test_a_site_whose_scales_fit_into_no_weight_has_none_and_the_others_do():
    """A write behind a square: scaling the rows by s scales the write by its square."""
    program, kept = lowered(dispfx.capture(one_branch(Squared)))
    scaled = insert_scales(program, kept)
    kinds = {program.site(fold.site).kind for fold in scaled.folds}
    assert {site.kind for site in program.sites} == {"read", "inner", "write"} and kinds == {"read", "inner"}
    drawn(scaled)
    assert folded_error(scaled, token_ids(2, 9, vocabulary=SMALL)) < 1e-5


def test_scales_learn_and_nothing_else_does(plain: Program):
    program, kept = lowered(plain)
    scaled = insert_scales(program, kept)
    ids = token_ids(2, 9, vocabulary=SMALL)
    scaled.program.graph_module.requires_grad_(False)
    for scale in scaled.scales.values():
        scale.requires_grad_(True)
    scaled.program.graph_module(ids).square().sum().backward()
    assert all(
        scale.grad is not None and bool(scale.grad.abs().sum() > 0) for scale in scaled.scales.values()
    )
