"""pad-values: attention of a prefill gets values of the size of keys; the cache keeps smaller ones."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.pipelines import static_programs
from dispfx.compiler.programs import lower_program
from dispfx.ir.cached_inputs import CachedDecoder, cache_tensors
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.printer import print_program
from dispfx.ir.program import Program
from dispfx.passes.last_logits import LastLogits
from dispfx.passes.pad_values import PadValues
from dispfx.passes.static_cache import StaticCache
from dispfx.plan.plan import Plan
from tests.passes.golden import calls_of
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
StaticDecoder = importlib.import_module("static_decoder").StaticDecoder
sys.path.pop(0)
LENGTH = 24


@pytest.fixture(scope="module")
def pruned() -> Program:
    """Heads of eight features, whose values have six."""
    program = capture_cached(tiny_transformer("llama"), sites="attention-values")
    generator = torch.Generator().manual_seed(0)
    kept = {site.name: torch.arange(site.size) for site in program.sites}
    for site in program.sites:
        if site.kind == "values":
            each = torch.rand(site.experts, 8, generator=generator).argsort(1)[:, :6]
            kept[site.name] = (each + 8 * torch.arange(site.experts)[:, None]).flatten()
    return lower_program(program, Plan.from_masks(program, kept), write="gather-add")


@pytest.fixture(scope="module")
def whole() -> Program:
    program = capture_cached(tiny_transformer("llama"))
    return lower_program(program, Plan.random(program, 0.3, seed=0), write="gather-add")


def prefill(program: Program) -> Program:
    return Pipeline([LastLogits(), StaticCache(LENGTH, "new")]).run(program.clone())


def test_smaller_values_get_zeros_and_the_result_loses_them(pruned: Program):
    """Rule 1, and a second run changes nothing."""
    before = prefill(pruned)
    program = before.clone()
    assert PadValues().run(program).changed
    pads, narrow = calls_of(program, "constant_pad_nd").splitlines(), calls_of(program, "slice")
    assert len(pads) == 2 and all("[0, 2]" in one and one.endswith("8) float32") for one in pads)
    assert narrow.count(", 3, 0, 6)") == 2
    assert cache_tensors(program.graph) == cache_tensors(before.graph)
    assert {one.size for one in cache_tensors(program.graph)} == {6, 8}
    assert not PadValues().run(program).changed


def test_values_of_the_size_of_keys_are_left_alone(whole: Program):
    """Rule 2."""
    program = prefill(whole)
    printed = print_program(program)
    assert not PadValues().run(program).changed and print_program(program) == printed


@pytest.mark.parametrize("padded", [False, True])
def test_prefill_and_decode_are_those_of_the_cache_that_grows(pruned: Program, padded: bool):
    """Rule 1: the zeros add nothing."""
    ids = token_ids(2, LENGTH - 2, vocabulary=VOCABULARY)
    grows = CachedDecoder(pruned.graph_module)
    expected = [grows(ids[:, :7])[:, -1:], *(grows(ids[:, at : at + 1]) for at in range(7, 12))]
    programs = static_programs(pruned, LENGTH, padded=padded)
    assert "constant_pad_nd" in print_program(programs.prefill)
    static = StaticDecoder(programs, batch=2)
    found = [static.prefill(ids[:, :7]), *(static.step(ids[:, at : at + 1]) for at in range(7, 12))]
    assert relative_error(torch.cat(found, 1), torch.cat(expected, 1)) < 1e-5
