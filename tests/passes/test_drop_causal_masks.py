"""drop-causal-masks: a mask goes where it is causal at the asked length, and stays everywhere else."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dispfx
from dispfx.ir import ops
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.drop_causal_masks import DropCausalMasks
from dispfx.passes.group_heads import GroupHeads
from tests.plain_decoders import HEADS, WIDTH, Attention, Decoder, Form, perturb
from tests.programs import relative_error, token_ids

TOKENS = 24


class Masked(Attention):
    """Attention with an explicit mask, made from the shape of the ids unless `mask` says otherwise."""

    def __init__(self, mask: Any):
        super().__init__(Form())
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, self.mask(x))
        return self.out(mixed.transpose(1, 2).flatten(-2))


def distance(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return places[:, None] - places[None, :]


def causal(x: Tensor) -> Tensor:
    return distance(x) >= 0


def additive(x: Tensor) -> Tensor:
    return torch.zeros(()).masked_fill(distance(x) < 0, torch.finfo(torch.float32).min)


def window(width: int) -> Any:
    return lambda x: (distance(x) >= 0) & (distance(x) < width)


def biased(x: Tensor) -> Tensor:
    return additive(x) - 0.1 * distance(x).clamp_min(0)


def by_content(x: Tensor) -> Tensor:
    return causal(x) & (x.mean(-1) < 1e9)[:, None, None, :]


def shifted(x: Tensor) -> Tensor:
    return distance(x) >= -1


def captured(mask: Any) -> Program:
    torch.manual_seed(0)
    decoder = Decoder(Form(), layers=2)
    for layer in decoder.layers:
        layer.attention = Masked(mask)  # type: ignore[assignment]
    return dispfx.capture(perturb(decoder))


def masks_of(program: Program) -> list[object]:
    nodes = [node for node in program.graph.nodes if ops.packet(node) in ops.ATTENTION]
    return [ops.argument(node, 3, "attn_mask") for node in nodes]


def simplified(program: Program, tokens: int = TOKENS) -> Program:
    return Pipeline([DropCausalMasks(tokens, requires="canonical")]).run(program.clone())


@pytest.mark.parametrize("mask", [causal, additive, window(TOKENS), window(TOKENS + 40)])
def test_a_causal_mask_is_dropped_and_nothing_changes(mask):
    """Rules 1 and 3."""
    program = captured(mask)
    assert all(value is not None for value in masks_of(program))
    fast = simplified(program)
    assert masks_of(fast) == [None, None]
    ids = token_ids(2, TOKENS)
    assert relative_error(fast.graph_module(ids), program.graph_module(ids)) < 1e-6
    assert fast.parameters.keys() == program.parameters.keys() and fast.sites == program.sites
    assert all(tensor is program.parameters[path] for path, tensor in fast.parameters.items())


@pytest.mark.parametrize("mask", [window(TOKENS - 1), biased, by_content, shifted])
def test_every_other_mask_is_left_alone(mask):
    """Rule 1."""
    program = captured(mask)
    fast = simplified(program)
    assert all(value is not None for value in masks_of(fast))
    assert [node.format_node() for node in fast.graph.nodes] == [
        node.format_node() for node in program.graph.nodes
    ]


def test_a_second_run_changes_nothing():
    fast = simplified(captured(causal))
    before = [node.format_node() for node in fast.graph.nodes]
    assert [node.format_node() for node in simplified(fast).graph.nodes] == before


def test_a_window_is_kept_in_one_layer_while_the_other_goes():
    torch.manual_seed(0)
    decoder = Decoder(Form(), layers=2)
    decoder.layers[0].attention = Masked(window(8))  # type: ignore[assignment]
    decoder.layers[1].attention = Masked(causal)  # type: ignore[assignment]
    program = dispfx.capture(perturb(decoder))
    fast = simplified(program)
    kept, dropped = masks_of(fast)
    assert kept is not None and dropped is None
    ids = token_ids(2, TOKENS)
    assert relative_error(fast.graph_module(ids), program.graph_module(ids)) < 1e-6


class Earlier(Masked):
    """Attention that also sees one key before the first token, as a cache would give it."""

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(F.pad(x, (0, 0, 1, 0))), self.value(F.pad(x, (0, 0, 1, 0))))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, F.pad(causal(x), (1, 0), value=True))
        return self.out(mixed.transpose(1, 2).flatten(-2))


def test_a_mask_over_more_keys_than_queries_is_left_alone():
    """Rule 2."""
    torch.manual_seed(0)
    decoder = Decoder(Form(), layers=1)
    decoder.layers[0].attention = Earlier(causal)  # type: ignore[assignment]
    (mask,) = masks_of(simplified(dispfx.capture(perturb(decoder))))
    assert mask is not None


class Grouped(Masked):
    """Two heads of keys and values for four of queries."""

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query, self._repeated(self.key(x)), self._repeated(self.value(x)), self.mask(x)
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def _repeated(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = x[..., : WIDTH // 2].unflatten(-1, (HEADS // 2, -1)).transpose(1, 2)
        size = heads.shape[-1]
        spread = heads[:, :, None].expand(batch, HEADS // 2, 2, tokens, size)
        return spread.reshape(batch, HEADS, tokens, size)


@pytest.mark.parametrize(("mask", "shared"), [(causal, True), (window(8), False)])
def test_heads_are_grouped_where_no_mask_is_left(mask, shared):
    torch.manual_seed(0)
    decoder = Decoder(Form(), layers=1)
    decoder.layers[0].attention = Grouped(mask)  # type: ignore[assignment]
    program = dispfx.capture(perturb(decoder))
    steps = [DropCausalMasks(TOKENS, requires="canonical"), GroupHeads(masked=False, requires="canonical")]
    fast = Pipeline(steps).run(program.clone())
    (attention,) = [node for node in fast.graph.nodes if ops.packet(node) in ops.ATTENTION]
    assert bool(attention.kwargs.get("enable_gqa")) == shared
    ids = token_ids(2, TOKENS)
    assert relative_error(fast.graph_module(ids), program.graph_module(ids)) < 1e-6
