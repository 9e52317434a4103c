"""Caches in place: prefill and decode are those of the caches that grow, dense and pruned."""

import importlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dispfx
from dispfx.benchmark.decoder_speed import step_inputs
from dispfx.compiler.pipelines import StaticPrograms, static_programs
from dispfx.errors import DataError, UnsupportedGraphError
from dispfx.fast_decoder.layered import LayeredDecoder
from dispfx.ir.cached_inputs import CachedDecoder, CachedShape
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.outline_layers import OutlineLayers
from dispfx.plan.plan import Plan
from tests.captures import lowered_with_cache, plain
from tests.passes.golden import calls_of
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
StaticDecoder = importlib.import_module("static_decoder").StaticDecoder
sys.path.pop(0)
# Sums over keys run in another order when hidden places are among them.
ORDER_OF_SUMS = 1e-5
PREFILL, STEPS, LENGTH = 7, 32, 40
QUICK = ("llama", "gpt2")
SLOW = ("qwen3", "phi", "gemma2", "gemma3", "mixtral", "deepseek", "roberta")


@dataclass(frozen=True)
class Case:
    """A pruned decoder, and the logits of a text (B, T) by the cache that grows."""

    program: Program
    ids: Tensor
    logits: Tensor


@cache
def case_of(name: str) -> Case:
    program = lowered_with_cache(name, 0.4)
    ids = token_ids(2, PREFILL + STEPS, vocabulary=VOCABULARY - 8) + 8
    decoder = CachedDecoder(program.graph_module)
    logits = [decoder(ids[:, :PREFILL])[:, -1:]]
    logits += [decoder(ids[:, place : place + 1]) for place in range(PREFILL, PREFILL + STEPS)]
    return Case(program, ids, torch.cat(logits, dim=1))


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def case(request) -> Case:
    """One pruned decoder of each arrangement."""
    return case_of(request.param)


def generated(programs: StaticPrograms, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of a prompt's last token and of single steps after it."""
    decoder = StaticDecoder(programs, batch=len(ids))
    logits = [decoder.prefill(ids[:, :PREFILL], mask)]
    logits += [decoder.step(ids[:, place : place + 1]) for place in range(PREFILL, ids.shape[1])]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("padded", [False, True])
def test_prefill_and_32_steps_are_those_of_a_cache_that_grows(case: Case, padded: bool):
    """Rule 3 of static_cache."""
    programs = static_programs(case.program, LENGTH, padded=padded)
    assert relative_error(generated(programs, case.ids), case.logits) <= ORDER_OF_SUMS


def test_a_left_padded_prompt_is_the_prompt_alone():
    case, pad = case_of("llama"), 3
    mask = torch.ones(2, PREFILL, dtype=torch.int64)
    mask[1, :pad] = 0
    both = generated(static_programs(case.program, LENGTH, padded=True), case.ids, mask)
    decoder = CachedDecoder(case.program.graph_module)
    alone = [decoder(case.ids[1:, pad:PREFILL])[:, -1:]]
    alone += [decoder(case.ids[1:, place : place + 1]) for place in range(PREFILL, PREFILL + STEPS)]
    assert relative_error(both[1:], torch.cat(alone, dim=1)) <= ORDER_OF_SUMS
    assert relative_error(both[:1], case.logits[:1]) <= ORDER_OF_SUMS


def test_several_tokens_in_one_step_are_the_same_as_one_by_one():
    case = case_of("llama")
    decoder = StaticDecoder(static_programs(case.program, LENGTH), batch=2)
    decoder.prefill(case.ids[:, :PREFILL])
    logits = decoder.step(case.ids[:, PREFILL : PREFILL + 5])
    assert relative_error(logits, case.logits[:, 1:6]) <= ORDER_OF_SUMS


def test_a_second_text_forgets_the_first():
    case = case_of("llama")
    decoder = StaticDecoder(static_programs(case.program, LENGTH), batch=2)
    first = decoder.prefill(case.ids[:, :PREFILL]), decoder.step(case.ids[:, :1])
    decoder.prefill(case.ids[:, 3:20])
    second = decoder.prefill(case.ids[:, :PREFILL]), decoder.step(case.ids[:, :1])
    assert all(map(torch.equal, first, second))


def test_without_padding_causal_attention_has_no_mask():
    """Rule 4 of static_cache."""
    programs = static_programs(case_of("llama").program, LENGTH)
    prefill = calls_of(programs.prefill, "scaled_dot_product_attention").splitlines()
    assert len(prefill) == 2 and all(
        "is_causal=True" in call and "enable_gqa=True" in call for call in prefill
    )
    assert calls_of(programs.decode, "dispfx.cached_attention").count("start") == 2
    for program in (programs.prefill, programs.decode):
        assert not calls_of(program, "le") and not calls_of(program, "cat(")
        # Rotations may be expanded over the batch, (B, F, 1); masks, keys and values have four dimensions.
        assert not re.search(r": \(\w+(, \w+){3}\) ", calls_of(program, "expand"))


@pytest.mark.slow
def test_a_sliding_window_keeps_its_mask():
    programs = static_programs(case_of("gemma3").program, LENGTH)
    decode = calls_of(programs.decode, "scaled_dot_product_attention").splitlines()
    assert len(decode) == 1, "the layer with a window"
    assert calls_of(programs.decode, "dispfx.cached_attention").count("start") == 1


@pytest.mark.slow
def test_a_window_that_no_text_reaches_is_no_window():
    programs = static_programs(case_of("gemma3").program, 8)
    assert calls_of(programs.decode, "dispfx.cached_attention").count("start") == 2


def test_both_graphs_share_their_weights_with_the_program():
    programs = static_programs(case_of("llama").program, LENGTH)
    prefill, decode = programs.prefill.parameters, programs.decode.parameters
    assert prefill.keys() == decode.keys()
    assert all(prefill[path] is decode[path] for path in prefill)
    assert "model.layers.0.self_attn.q_proj_k_proj_v_proj.weight" in prefill


def test_a_text_longer_than_the_cache_is_refused():
    case = case_of("llama")
    decoder = StaticDecoder(static_programs(case.program, PREFILL + 1), batch=2)
    with pytest.raises(DataError, match="places"):
        decoder.prefill(case.ids[:, : PREFILL + 2])
    decoder.prefill(case.ids[:, :PREFILL])
    decoder.step(case.ids[:, :1])
    with pytest.raises(DataError, match="places"):
        decoder.step(case.ids[:, :1])


def test_padding_that_would_be_ignored_is_refused():
    case = case_of("llama")
    decoder = StaticDecoder(static_programs(case.program, LENGTH), batch=2)
    with pytest.raises(DataError, match="padded=True"):
        decoder.prefill(case.ids[:, :PREFILL], torch.zeros(2, PREFILL, dtype=torch.int64))


def test_a_program_without_a_cache_is_refused():
    program = plain("llama")
    lowered = dispfx.compiler.programs.lower_program(program, Plan.random(program, 0.0, seed=0))
    with pytest.raises(UnsupportedGraphError, match="with a cache"):
        static_programs(lowered, LENGTH)


@pytest.mark.slow
# torch.compile itself imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_graphs_give_the_same():
    case = case_of("llama")
    decoder = StaticDecoder(static_programs(case.program, LENGTH), batch=2, compile=torch.compile)
    logits = [decoder.prefill(case.ids[:, :PREFILL])]
    logits += [decoder.step(case.ids[:, place : place + 1]) for place in range(PREFILL, PREFILL + 3)]
    assert relative_error(torch.cat(logits, dim=1), case.logits[:, :4]) <= ORDER_OF_SUMS


@pytest.mark.parametrize(("ratio", "kinds"), [(0.0, 1), (0.4, 2)])
def test_layers_of_a_static_program_share_bodies_and_write_their_caches(ratio: float, kinds: int):
    program = lowered_with_cache("llama", ratio)
    programs = static_programs(program, LENGTH)
    for static, shape in ((programs.prefill, (2, 7, 0)), (programs.decode, (2, 1, 20))):
        Pipeline([OutlineLayers("static")]).run(static)
        assert static.outline is not None and len(static.outline.kinds) == kinds
        inputs = step_inputs(static, CachedShape(*shape), LENGTH)
        twins = [tensor.clone() for tensor in inputs]
        assert torch.equal(LayeredDecoder(static)(*twins), static.graph_module(*inputs))
        assert all(map(torch.equal, twins, inputs)), "the caches too"
