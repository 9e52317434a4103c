"""Weights in parts on two ranks change no bit, take half the memory, and are refused where they cannot be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DispfxError, UnsupportedGraphError
from dispfx.fast_decoder import decoder
from dispfx.fast_decoder.shards import check_gradients, check_shareable
from dispfx.ir.outline import Outline
from dispfx.ir.retype import placed
from dispfx.learning.state import saved_step
from dispfx.run.mask_learning import learn
from tests.captures import plain
from tests.programs import program_of
from tests.training.gated import plain_and_fast
from tests.training.sharded_ranks import IN_PARTS, ONE_NUMBER, changed, look, plan_of, run_ranks, text_of

INFORMED = changed(start="sensitivity", samples=4, held_out_every=3)
LOOKS: dict[str, dict[str, Any]] = {
    "checkpointed": {"form": "pre-norm", "checkpointing": True},
    "kept": {"form": "parallel-one-add", "checkpointing": False},
    "a weight of one number": {"form": ONE_NUMBER, "checkpointing": False},
    "tied": {"form": "tied-embeddings", "checkpointing": True},
}

pytestmark = pytest.mark.long


def _work(ranks: Ranks, folder: Path) -> dict[str, Any]:
    decoder.BACKEND = "aot_eager"
    found: dict[str, Any] = {name: look(ranks=ranks, **chosen) for name, chosen in LOOKS.items()}
    found["compiled"] = look("pre-norm", ranks, checkpointing=False, compiled=True)
    found["whole plan"] = plan_of("pre-norm", ranks, None)
    found["plan"] = plan_of("pre-norm", ranks, IN_PARTS)
    found["checkpointed plan"] = plan_of("pre-norm", ranks, replace(IN_PARTS, checkpointing="on"))
    found["whole informed plan"] = plan_of("tied-embeddings", ranks, None, INFORMED)
    found["informed plan"] = plan_of("tied-embeddings", ranks, IN_PARTS, INFORMED)
    half, state = changed(steps=4, schedule="constant"), folder / "state"
    plan_of("pre-norm", ranks, IN_PARTS, half, state=state)
    found["stopped"] = saved_step(state)
    found["resumed plan"] = plan_of("pre-norm", ranks, IN_PARTS, state=state, resume=True)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    found = run_ranks(tmp_path_factory.mktemp("ranks"), _work)
    assert all(isinstance(one, dict) for one in found), found
    return found


@pytest.mark.parametrize("name", [*LOOKS, "compiled"])
def test_loss_and_gradients_have_the_bits_of_whole_weights_on_every_rank(seen, name):
    """Rule 2, by a decoder with weights of one number."""
    for rank in seen:
        assert rank[name]["same_loss"] and rank[name]["same_gradient"] and rank[name]["mask_changes"]


@pytest.mark.parametrize("name", list(LOOKS))
def test_the_whole_graph_can_be_computed_too_and_agrees(seen, name):
    assert all(rank[name]["graph_error"] < 1e-5 for rank in seen)


@pytest.mark.parametrize("name", list(LOOKS))
def test_a_rank_holds_half_of_the_weights_and_two_layers_at_most(seen, name):
    """Rule 1."""
    for rank in seen:
        found = rank[name]
        # Rows that do not divide are on one rank.
        assert abs(found["own"] - found["whole"] / 2) < 0.01 * found["whole"]
        assert found["layer"] <= found["most"] <= 2 * found["layer"]
        assert found["left"] == 0


def test_the_plan_is_that_of_whole_weights(seen):
    leading = seen[0]
    assert leading["whole plan"] and leading["whole informed plan"]
    assert leading["plan"] == leading["checkpointed plan"] == leading["whole plan"]
    assert leading["informed plan"] == leading["whole informed plan"]


def test_the_plan_is_that_of_one_rank_with_the_whole_batch(seen):
    assert seen[0]["plan"] == plan_of("pre-norm", ALONE, None)
    # A few steps less are another plan, so that the comparison says something.
    assert seen[0]["plan"] != plan_of("pre-norm", ALONE, None, changed(steps=4))


def test_a_run_with_parts_resumes_to_the_same_plan(seen):
    assert seen[0]["stopped"] == 4
    assert seen[0]["resumed plan"] == seen[0]["plan"]


def test_one_rank_cannot_have_a_part():
    with pytest.raises(DispfxError, match="but there is only one"):
        learn(program_of("pre-norm"), text_of(changed()), 0.3, settings=changed(), compute=IN_PARTS)


def test_scores_are_not_learned_in_parts():
    settings = changed(method="magnitude")
    with pytest.raises(DispfxError, match="leave out `shard`"):
        learn(program_of("pre-norm"), text_of(settings), 0.3, settings=settings, compute=IN_PARTS)


def test_a_weight_that_two_layers_read_is_refused_by_its_name():
    """Rule 3."""
    _, fast = plain_and_fast()
    outline = fast.outline
    assert outline is not None
    weights = set(fast.parameters)
    check_shareable(outline, weights)
    first, second, *others = outline.layers
    path = next(path for path in first.tensors if path in weights)
    sharing = replace(second, tensors=(*second.tensors, path))
    with pytest.raises(UnsupportedGraphError, match=path.replace(".", r"\.")):
        check_shareable(Outline(outline.prologue, (first, sharing, *others), outline.epilogue), weights)
    at_the_end = replace(outline.epilogue, tensors=(*outline.epilogue.tensors, path))
    with pytest.raises(UnsupportedGraphError, match="several layers read one"):
        check_shareable(Outline(outline.prologue, outline.layers, at_the_end), weights)


def test_a_gate_before_the_first_layer_is_refused():
    _, fast = plain_and_fast()
    outline = fast.outline
    assert outline is not None
    check_gradients(outline)
    gated = replace(outline.prologue, values=(*outline.prologue.values, "mask_0"))
    with pytest.raises(UnsupportedGraphError, match="before the first layer"):
        check_gradients(Outline(gated, outline.layers, outline.epilogue))


def test_a_placed_program_computes_elsewhere_and_its_weights_stay():
    program = plain("llama")
    twin = placed(program, torch.device("meta"))
    assert twin.device == torch.device("meta") and program.device == torch.device("cpu")
    named = [value for node in twin.graph.nodes for value in node.kwargs.values()]
    assert torch.device("cpu") not in named
    parameters = twin.parameters
    assert all(parameters[path] is tensor for path, tensor in program.parameters.items())
