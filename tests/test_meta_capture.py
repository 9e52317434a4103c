"""A decoder without values is analysed like the same decoder with values, in time linear in depth."""

import sys
from typing import Any

import pytest
import torch
from torch import nn

from dispfx.capturing.module_capture import capture as capture_module
from dispfx.compiler.pipelines import run_pipeline
from dispfx.compiler.programs import capture
from dispfx.errors import CaptureError
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from tests.plain_decoders import FORMS, Decoder, build
from tests.tiny_transformers import tiny_transformer


def facts(program: Program) -> Any:
    sites = [(site, [(point.dim, point.labels) for point in site.gates]) for site in program.sites]
    return sites, program.branches, program.refused, program.shapes, program.dtype, program.vocabulary_size


@pytest.mark.parametrize("form", ["pre-norm", "fused-gate-up", "parallel-one-add", "tied-embeddings"])
def test_sites_need_no_values(form: str):
    with torch.device("meta"):
        model = Decoder(FORMS[form])
    with_values, without = capture(build(FORMS[form])), capture(model)
    assert facts(without) == facts(with_values)
    assert with_values.measured and not without.measured
    assert all(tensor.is_meta for _, tensor in without.tensors())


def test_sites_of_a_transformers_decoder_need_no_values():
    """It looks at values while it runs, so running it on the meta device would fail."""
    model = tiny_transformer("llama")
    with_values = facts(capture(model))
    assert facts(capture(model.to("meta"))) == with_values


def test_a_fingerprint_without_values_is_another():
    """A plan of a config must not pass for a plan of the weights."""
    model = build(FORMS["pre-norm"])
    assert capture(model).fingerprint != capture(model.to("meta")).fingerprint


def test_a_plan_can_be_counted_without_values():
    with_values, without = (capture(build(FORMS["pre-norm"]).to(device)) for device in ("cpu", "meta"))
    plans = [Plan.random(program, 0.3, 0) for program in (with_values, without)]
    assert plans[0].achieved == plans[1].achieved
    assert all(torch.equal(plans[0].kept[name], plans[1].kept[name]) for name in plans[0].kept)


def test_a_decoder_with_some_values_missing_is_refused():
    model = build(FORMS["pre-norm"])
    model.head.weight = nn.Parameter(model.head.weight.to("meta"))
    with pytest.raises(CaptureError, match="all parameters must hold values, or none") as caught:
        capture(model)
    assert caught.value.where == "head.weight"


def test_the_module_stays_on_the_meta_device():
    model = build(FORMS["pre-norm"]).to("meta")
    capture(model)
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())


def calls_of_analysis(form: str, layers: int) -> int:
    """Return how many Python functions and generators are entered while a decoder is analysed."""
    program = capture_module(build(FORMS[form], layers=layers).to("meta"))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run_pipeline("analyse", program)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("form", ["pre-norm", "parallel-one-add"])
def test_the_work_of_the_analysis_is_linear_in_depth(form: str):
    """Counted, not timed: a layer in the middle costs the same however many there are."""
    few, more, many = (calls_of_analysis(form, layers) for layers in (2, 4, 8))
    assert (many - more) / 4 < 1.1 * (more - few) / 2
