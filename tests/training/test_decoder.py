"""The decoder that learning calls computes what the gated graph computes."""

import pytest
import torch

from dispfx.fast_decoder.comparison import compare, sample_masks, value_and_gradient
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.preparation import PlainDecoder
from tests.plain_decoders import FORMS
from tests.programs import token_ids
from tests.training.gated import plain_and_fast


def masks_for(decoder: TrainingDecoder, *samples: int) -> torch.Tensor:
    return sample_masks((*samples, sum(decoder.sizes)), torch.device("cpu"))


@pytest.mark.parametrize("form", list(FORMS))
def test_layers_and_chunks_agree_with_the_whole_graph(form):
    plain, fast = plain_and_fast(form)
    decoder, ordinary = TrainingDecoder(fast), PlainDecoder(plain)
    assert decoder.in_chunks
    decoder.rows = 10
    found = compare(decoder.loss, ordinary.loss, token_ids(2, 24), masks_for(decoder), torch.float32)
    assert found.loss < 1e-5 and found.gradient < 1e-5 and found.holds


@pytest.mark.parametrize("compiled", [False, True])
def test_gates_of_heads_and_values_have_the_gradients_of_the_whole_graph(monkeypatch, compiled):
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    plain, fast = plain_and_fast("fused-qkv", sites=("heads", "attention-values"))
    decoder, ordinary = TrainingDecoder(fast, compiled=compiled), PlainDecoder(plain)
    for ids, masks in ((token_ids(2, 24), masks_for(decoder)), (token_ids(4, 24), masks_for(decoder, 2))):
        found = compare(decoder.loss, ordinary.loss, ids, masks, torch.float32, decoder.sizes)
        assert found.loss < 1e-5 and found.gradient < 1e-5 and found.holds


def test_checkpoints_keep_less_and_change_no_bit():
    _, fast = plain_and_fast()
    ids, masks = token_ids(2, 24), masks_for(TrainingDecoder(fast))
    kept, results = [], []
    for wanted in (False, True):
        decoder, sizes = TrainingDecoder(fast, checkpointing=wanted), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            decoder.loss(ids, masks.clone().requires_grad_())
        kept.append(sum(sizes))
        results.append(value_and_gradient(decoder.loss, ids, masks))
    assert kept[1] < 0.3 * kept[0]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bodies_for_a_compiler_have_the_gradients_of_plain_ones(monkeypatch, checkpointing):
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    _, fast = plain_and_fast("fused-gate-up")
    plain, compiled = TrainingDecoder(fast), TrainingDecoder(fast, compiled=True, checkpointing=checkpointing)
    found = compare(compiled.loss, plain.loss, token_ids(2, 24), masks_for(plain), torch.float32)
    assert found.loss < 1e-6 and found.gradient < 1e-5


def test_sequences_with_masks_of_their_own_are_compiled_too(monkeypatch):
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    _, fast = plain_and_fast()
    plain, compiled = TrainingDecoder(fast), TrainingDecoder(fast, compiled=True)
    ids, masks = token_ids(4, 24), masks_for(plain, 2)
    found = compare(compiled.loss, plain.loss, ids, masks, torch.float32)
    assert found.loss < 1e-6 and found.gradient < 1e-5
    alone = [plain.loss(ids[rows], masks[row]) for row, rows in enumerate((slice(0, 2), slice(2, 4)))]
    torch.testing.assert_close(compiled.loss(ids, masks), torch.stack(alone).mean())


@pytest.mark.parametrize(("join", "groups"), [(True, 2), (False, 0)])
def test_projections_that_read_one_value_are_joined_in_compiled_layers(monkeypatch, join, groups):
    joined = []

    def look(graph, inputs):
        targets = [node.target for node in graph.graph.nodes]
        joined.append(targets.count(torch.ops.dispfx.sibling_products.default))
        return graph.forward

    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", look)
    torch._dynamo.reset()
    _, fast = plain_and_fast()
    decoder = TrainingDecoder(fast, compiled=True, join=join)
    decoder.loss(token_ids(2, 24), masks_for(decoder).requires_grad_()).backward()
    assert joined[0] == groups  # query, key and value; gate and up


def test_every_layer_of_a_kind_is_one_compilation(monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", count)
    compiled = {}
    for layers in (2, 5):
        torch._dynamo.reset()
        graphs.clear()
        _, fast = plain_and_fast(layers=layers)
        decoder = TrainingDecoder(fast, compiled=True)
        masks = torch.ones(sum(decoder.sizes), requires_grad=True)
        decoder.loss(token_ids(2, 24), masks).backward()
        compiled[layers] = list(graphs)
        # What is only evaluated, and what has another shape, is not compiled again.
        with torch.no_grad():
            decoder.loss(token_ids(1, 24), masks)
        decoder.loss(token_ids(1, 12), masks)
        assert compiled[layers] == graphs
    assert compiled[2] == compiled[5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch itself
def test_compiled_layers_have_the_gradients_of_plain_ones():
    _, fast = plain_and_fast(layers=2)
    plain, compiled = TrainingDecoder(fast), TrainingDecoder(fast, compiled=True)
    found = compare(compiled.loss, plain.loss, token_ids(2, 24), masks_for(plain), torch.float32)
    assert found.holds
