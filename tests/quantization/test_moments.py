"""Weighed second moments, against sums over single tokens."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dispfx.errors import UnsupportedGraphError
from dispfx.quantization.moments import weighted_moments
from dispfx.quantization.rounded_layers import layers_to_round, rounded_layers, weight_of_layer
from dispfx.quantization.weight_rounding import Grid, error, to_nearest
from tests.tiny_transformers import VOCABULARY, tiny_transformer


def texts(count: int = 2, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (2, length), generator=generator) for _ in range(count)]


def token_by_token(model: nn.Module, layer: nn.Module, texts: list[Tensor]) -> Tensor:
    """Σ w(t) x(t)ᵀ x(t) / Σ w(t), where w(t) is the square of the loss's gradient for the layer's result."""
    total, weight = torch.zeros(()), 0.0
    for ids in texts:
        seen: dict[str, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Tensor], output: Tensor, seen: dict = seen) -> Tensor:
            seen["x"], seen["y"] = args[0].detach(), output
            output.requires_grad_()
            output.retain_grad()
            return output

        handle = layer.register_forward_hook(keep)
        logits = model(ids).logits  # type: ignore[operator]
        F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)).backward()
        handle.remove()
        gradient = seen["y"].grad
        assert gradient is not None
        for b in range(ids.shape[0]):
            for t in range(ids.shape[1]):
                square = float(gradient[b, t].square().sum())
                total = total + square * torch.outer(seen["x"][b, t], seen["x"][b, t])
                weight += square
    return total / weight


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_token_counts_by_what_an_error_of_its_result_does_to_the_loss(kind: str):
    model = tiny_transformer(kind)
    layers = layers_to_round(model)
    model.requires_grad_(False)
    found = weighted_moments(model, layers, texts())

    assert found.keys() == layers.keys()
    for path in list(layers)[:3]:
        expected = token_by_token(model, layers[path], texts())
        assert torch.allclose(found[path], expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max()))


class _InPlace(nn.Module):
    """Overwrites what it has squared, as some recurrent decoders do."""

    def forward(self, x: Tensor) -> Tensor:
        squared = x.square()
        x.mul_(0.5)
        return squared


def test_a_decoder_that_overwrites_its_activations_is_named():
    model: Any = tiny_transformer("gpt2")
    model.transformer.h[1].mlp.act = _InPlace()
    with pytest.raises(UnsupportedGraphError, match="modified by an inplace operation") as raised:
        weighted_moments(model.requires_grad_(False), layers_to_round(model), texts())
    assert "GPT2LMHeadModel" in str(raised.value) and "round to nearest" in str(raised.value)


def test_float16_does_not_lose_the_small_gradients_of_a_long_text():
    """Without a scale, the loss of a mean over 1,000 tokens changes moments by 3%."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    half = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=1024, **sizes)).half().eval()
    whole = copy.deepcopy(half).float()
    ids = [torch.randint(0, 1000, (1, 1000)) for _ in range(2)]
    found, expected = (
        weighted_moments(one.requires_grad_(False), layers_to_round(one), ids) for one in (half, whole)
    )
    for path, moments in expected.items():
        assert (found[path] - moments).norm() < 2e-3 * moments.norm(), path


@pytest.mark.parametrize(("kind", "count"), [("llama", 14), ("gpt2", 8)])
def test_all_layers_but_the_head_are_rounded_and_the_decoder_stays_as_it_was(kind: str, count: int):
    model = tiny_transformer(kind)
    before = {path: one.clone() for path, one in model.state_dict().items()}
    layers = layers_to_round(model)
    assert len(layers) == count and not any("head" in path for path in layers)

    def again() -> Iterator[Tensor]:
        return iter(texts())

    found = dict(rounded_layers(model, layers, lambda layer: Grid(4, 32), again))

    assert found.keys() == layers.keys()
    assert all(torch.equal(before[path], one) for path, one in model.state_dict().items())
    assert all(one.requires_grad for one in model.parameters())
    moments = weighted_moments(model.requires_grad_(False), layers, texts())
    for path, one in found.items():
        weight = weight_of_layer(layers[path])
        nearest = to_nearest(weight, Grid(4, 32)).numbers
        assert error(weight, one.numbers, moments[path]) < error(weight, nearest, moments[path])


def test_moments_are_taken_in_parts_where_they_need_much_memory(monkeypatch: pytest.MonkeyPatch):
    model = tiny_transformer("llama")
    layers = layers_to_round(model)
    whole = dict(rounded_layers(model, layers, lambda layer: Grid(4, 32), lambda: texts()))
    monkeypatch.setattr("dispfx.quantization.rounded_layers._MOST_HELD", 1)
    parts = dict(rounded_layers(model, layers, lambda layer: Grid(4, 32), lambda: texts()))
    assert all(torch.equal(whole[path].codes, parts[path].codes) for path in layers)


def test_without_a_text_numbers_are_rounded_to_the_nearest():
    model = tiny_transformer("llama")
    layers = layers_to_round(model)
    for path, one in rounded_layers(model, layers, lambda layer: Grid(8, symmetric=True), None):
        nearest = to_nearest(weight_of_layer(layers[path]), Grid(8, symmetric=True))
        assert torch.equal(one.codes, nearest.codes)


def test_an_embedding_that_is_scaled_in_place_has_gradients():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)

        def get_input_embeddings(self) -> nn.Module:
            return self.table

        def forward(self, ids: Tensor):
            x = self.table(ids)
            x *= 2.0
            return SimpleNamespace(logits=self.head(self.layer(x)))

    model = Scaled().requires_grad_(False)
    found = weighted_moments(model, {"layer": model.layer}, [torch.arange(6)[None]])
    assert found["layer"].shape == (4, 4) and found["layer"].trace() > 0
