"""Bounds, counted by hand for a decoder whose sizes are known."""

from functools import cache

import pytest

import dispfx
from dispfx.benchmark.bound import StepCost, bound, step_cost
from dispfx.compiler.programs import lower_program
from dispfx.ir import ops
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from tests.captures import with_cache
from tests.plain_decoders import FORMS, INNER, VOCABULARY, WIDTH, build
from tests.programs import plan_keeping
from tests.tiny_transformers import VOCABULARY as TINY_VOCABULARY

LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER


@cache
def cached(name: str) -> Program:
    return with_cache(name)


def lowered(program: Program, ratio: float) -> Program:
    return lower_program(program, Plan.random(program, ratio, seed=0))


def test_every_product_of_a_prefill_is_counted():
    cost = step_cost(dispfx.capture(build(FORMS["pre-norm"], layers=1)), CachedShape(2, 10, 0))
    assert cost.layer_operations == 2 * 2 * 10 * LAYER
    assert cost.head_operations == 2 * 2 * WIDTH * VOCABULARY, "one token a sequence"
    # Two products of 32 features for each of the 55 pairs of a token and itself or one before it.
    assert cost.attention_operations == 2 * 2 * 2 * WIDTH * 55


def test_every_weight_and_the_cache_are_read_in_a_decode_step():
    cost = step_cost(cached("llama"), CachedShape(4, 1, 9))
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert cost.layer_bytes == 4 * (2 * layer + 32), "and the last norm"
    assert cost.head_bytes == 4 * 32 * TINY_VOCABULARY
    assert cost.embedding_bytes == 4 * 4 * 32
    assert cost.cache_bytes == 4 * 10 * 4 * (2 * 8) * 4, "keys and values of two layers"
    assert cost.bytes == cost.layer_bytes + cost.head_bytes + cost.embedding_bytes + cost.cache_bytes
    assert abs(sum(share for name, share in cost.shares().items() if name.endswith("bytes")) - 1) < 1e-9


def test_attention_of_a_step_reads_all_tokens_so_far():
    program = cached("llama")
    cost = step_cost(program, CachedShape(3, 1, 9))
    assert cost.attention_operations == 2 * 3 * 4 * 10 * (8 + 8) * 2


def test_spelled_out_attention_is_counted_over_all_tokens():
    program = cached("gemma2")
    if any(ops.packet(node) is ops.aten.scaled_dot_product_attention for node in program.graph.nodes):
        pytest.skip("this release of transformers computes it in one operation")
    cost = step_cost(program, CachedShape(3, 5, 9))
    assert cost.attention_operations == 2 * 3 * 4 * (5 * 14) * (8 + 8) * 2


def test_a_tied_head_is_read_as_the_head():
    program = dispfx.capture(build(FORMS["tied-embeddings"], layers=1))
    cost = step_cost(program, CachedShape(2, 1, 0))
    assert cost.head_bytes == 4 * WIDTH * VOCABULARY
    assert cost.embedding_bytes == 4 * 2 * WIDTH


def test_the_bound_is_the_quotient_of_what_both_read_or_compute():
    program = cached("llama")
    half = lowered(program, 0.5)
    decode, prefill = CachedShape(1, 1, 20), CachedShape(1, 30, 0)
    dense, pruned = (step_cost(one, decode) for one in (program, half))
    assert bound(dense, pruned, decode) == dense.bytes / pruned.bytes
    assert 1.0 < bound(dense, pruned, decode) < 2.0
    dense, pruned = (step_cost(one, prefill) for one in (program, half))
    assert bound(dense, pruned, prefill) == dense.operations / pruned.operations


def test_a_full_selection_has_a_bound_of_one():
    program = cached("llama")
    for shape in (CachedShape(1, 1, 20), CachedShape(2, 7, 0)):
        assert bound(step_cost(program, shape), step_cost(lowered(program, 0.0), shape), shape) == 1.0


def test_what_is_not_pruned_is_the_same_on_both_sides():
    program = dispfx.capture(build(FORMS["pre-norm"], layers=1))
    kept = {site.name: list(range(site.size // 2)) for site in program.sites}
    half = lower_program(program, plan_keeping(program, kept))
    before, after = (step_cost(one, CachedShape(1, 8, 0)) for one in (program, half))
    assert after.head_operations == before.head_operations
    assert after.attention_operations == before.attention_operations
    attention, mlp = 2 * WIDTH * WIDTH, 3 * WIDTH * INNER // 4
    assert after.layer_operations == 2 * 8 * (attention + mlp)


@pytest.mark.slow
def test_a_step_reads_the_experts_that_its_tokens_can_reach():
    program = cached("mixtral")
    one, many = (step_cost(program, CachedShape(batch, 1, 4)).layer_bytes for batch in (1, 8))
    expert = 4 * 3 * 32 * 48
    assert many - one == 2 * 2 * expert, "two of four experts a layer, and all of them"


def test_shares_of_nothing_are_zero():
    assert set(StepCost().shares().values()) == {0.0}
