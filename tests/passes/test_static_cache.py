"""static-cache: the graph with caches in place, what it refuses, and which masks it drops.

What the graphs compute is tested in tests/api/test_static.py.
"""

import operator
import re
from functools import cache

import pytest
import torch
from torch import fx

from dispfx.analysis.causal_mask import is_causal
from dispfx.compiler.programs import lower_program
from dispfx.errors import UnsupportedGraphError
from dispfx.ir.cached_inputs import CachedShape, cache_tensors, sample_inputs
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.ir.spec import verify_program
from dispfx.passes.group_heads import GroupHeads
from dispfx.passes.static_cache import StaticCache
from dispfx.plan.plan import Plan
from tests.captures import with_cache
from tests.passes.golden import calls_of, lines_of
from tests.tiny_transformers import VOCABULARY

LENGTH = 24


@cache
def captured(name: str) -> Program:
    program = with_cache(name)
    return lower_program(program, Plan.random(program, 0.3, seed=0), write="gather-add")


def lowered(name: str) -> Program:
    return Pipeline([GroupHeads()]).run(captured(name).clone())


def mask_of(program: Program) -> fx.Node:
    attention = next(node for node in program.graph.nodes if "scaled_dot" in node.name)
    mask = attention.args[3]
    assert isinstance(mask, fx.Node)
    return mask


def test_keys_and_values_are_written_to_their_places():
    """Rules 1, 2 and 3."""
    program = Pipeline([StaticCache(LENGTH)]).run(lowered("llama"))
    keys, values = calls_of(program, "index_copy_").splitlines()[:2]
    shape = r": \(B, 2, 24, 8\) float32"
    assert re.fullmatch(rf"index_copy_\(past_key_values_0_key, 2, places, add_\d+\){shape}", keys)
    assert re.fullmatch(rf"index_copy_\(past_key_values_0_value, 2, places, transpose_\d+\){shape}", values)
    assert lines_of(program, "places") == "  places = add(arange_default, start): (T) int64"
    assert "add(arange_2, start): (T) int64" in calls_of(program, "add")
    assert program.inputs[:5] == (
        "input_ids", "attention_mask", "position_ids", "start", "past_key_values.0.key",
    )  # fmt: skip
    assert program.outputs == ("logits",) and program.level == "static"


def test_a_decode_step_changes_one_place_of_every_cache():
    program = Pipeline([StaticCache(LENGTH, "prefix")]).run(lowered("llama"))
    ids, _, positions, *caches = sample_inputs(
        cache_tensors(program.graph), CachedShape(2, 1, LENGTH), VOCABULARY, torch.device("cpu")
    )
    before = [kept.clone() for kept in caches]
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    program.graph_module(ids, mask, positions, torch.tensor(5), *caches)
    for old, new in zip(before, caches, strict=True):
        changed = (old != new).any(-1).any(1)
        assert changed[:, 5].all() and changed.sum() == 2


def test_a_causal_mask_is_known_by_its_values():
    program = lowered("llama")
    assert is_causal(program, mask_of(program), LENGTH)


@pytest.mark.parametrize(
    ("target", "other"), [(aten.le, aten.lt.Tensor), (aten.le, aten.ge.Tensor), (aten.le, aten.ne.Tensor)]
)
def test_another_mask_is_not_causal(target: object, other: object):
    program = lowered("llama")
    (compared,) = (node for node in program.graph.nodes if packet(node) is target)
    compared.target = other
    program.rebuild(dict(program.tensors()))
    assert not is_causal(program, mask_of(program), LENGTH)


def test_a_window_shows_where_texts_are_longer():
    program = lowered("llama")
    (compared,) = (node for node in program.graph.nodes if packet(node) is aten.le)
    keys, queries = compared.args
    with program.graph.inserting_after(compared):
        near = program.graph.call_function(aten.sub.Tensor, (queries, keys))
    with program.graph.inserting_after(near):
        inside = program.graph.call_function(aten.lt.Scalar, (near, 16))
    with program.graph.inserting_after(inside):
        both = program.graph.call_function(aten.__and__.Tensor, (compared, inside))
    compared.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    program.rebuild(dict(program.tensors()))
    assert is_causal(program, mask_of(program), 16)
    assert not is_causal(program, mask_of(program), 17)


def test_a_mask_that_depends_on_tokens_is_not_causal():
    program = lowered("llama")
    mask = mask_of(program)
    ids = next(iter(program.graph.nodes))
    with program.graph.inserting_after(mask):
        some = program.graph.call_function(aten.any.default, (ids,))
    with program.graph.inserting_after(some):
        both = program.graph.call_function(aten.__or__.Tensor, (mask, some))
    assert not is_causal(program, both, LENGTH)


def test_the_number_of_cached_tokens_in_another_place_is_refused():
    """Rule 2."""
    program = lowered("llama")
    (total,) = (
        node
        for node in program.graph.nodes
        if node.target is operator.add and any(packet(user) is aten.arange for user in node.users)
    )
    (size,) = (value for value in total.args if "past" in str(value.args))  # type: ignore[union-attr]
    arange = next(user for user in total.users if packet(user) is aten.arange)
    arange.replace_input_with(total, size)
    with pytest.raises(UnsupportedGraphError, match="a position or part of a size"):
        Pipeline([StaticCache(LENGTH)]).run(program)


def test_a_cache_in_another_order_is_refused():
    """Rule 1."""
    program = lowered("llama")
    cat = next(iter(twin for past, twins in program.caches.items() for twin in twins if "cat" in twin.name))
    cat.update_arg(0, list(reversed(cat.args[0])))  # type: ignore[call-overload]
    with pytest.raises(UnsupportedGraphError, match="followed by the new ones"):
        Pipeline([StaticCache(LENGTH)]).run(program)


def test_in_place_operations_are_valid_in_a_static_program_and_on_caches_only():
    program = Pipeline([StaticCache(LENGTH)]).run(lowered("llama"))
    assert verify_program(program) is None
    program.level = "lowered"
    assert "in place" in str(verify_program(program))
    program.level = "static"
    write = next(node for node in program.graph.nodes if packet(node) is aten.index_copy_)
    cache_input = write.args[0]
    assert isinstance(cache_input, fx.Node)
    with program.graph.inserting_before(write):
        copied = program.graph.call_function(aten.clone.default, (cache_input,))
    write.replace_input_with(cache_input, copied)
    assert "in place" in str(verify_program(program))
