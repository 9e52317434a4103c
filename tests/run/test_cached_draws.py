"""Tokens are drawn with a cache only where the cache gives the decoder's own logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from dispfx.capturing.module_capture import module_logits
from dispfx.run.cached_draws import distance, drawn_by_cache
from dispfx.run.opening import open_model
from dispfx.run.sampled_text import SLOW, Openings, sampled_text
from dispfx.settings import ModelSettings
from dispfx.settings.verb_settings import SamplingSettings
from tests.tiny_transformers import tiny_transformer

COLD = SamplingSettings(tokens=80, seq_len=20, opening=6, batch_size=2, temperature=1e-5)
TEXT = Openings((torch.arange(2, 40),))


def held(options: dict[str, Any]) -> int:
    """How many tokens the cache holds that a decoder is called with."""
    caches = (options.get(name) for name in ("cache", "past_key_values"))
    return max((cache.get_seq_length() for cache in caches if cache is not None), default=0)


class Failing(GPT2LMHeadModel):
    """A decoder with which transformers cannot generate."""

    def forward(self, *ids: Any, **options: Any) -> Any:
        if held(options):
            raise ValueError("this decoder has no cache")
        return super().forward(*ids, **options)


class Exhausting(GPT2LMHeadModel):
    """A decoder for whose cache there is no memory."""

    def forward(self, *ids: Any, **options: Any) -> Any:
        if held(options):
            raise MemoryError
        return super().forward(*ids, **options)


class Late(GPT2LMHeadModel):
    """A decoder whose cache gives other logits from the tenth token on."""

    def forward(self, *ids: Any, **options: Any) -> Any:
        far = held(options) >= 10
        output: Any = super().forward(*ids, **options)
        if far:
            output.logits = output.logits.flip(-1)
        return output


def gpt2(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel, dropout: float = 0.0) -> GPT2LMHeadModel:
    plain: Any = tiny_transformer("gpt2")
    model = kind(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = dropout
    return model


def drawn(model: torch.nn.Module) -> tuple[Tensor, list[str]]:
    told: list[str] = []
    source = open_model(ModelSettings(model))
    return torch.cat(list(sampled_text(source, TEXT, COLD, told.append))), told


def share_of_likeliest(model: torch.nn.Module, text: Tensor) -> float:
    with torch.no_grad():
        likeliest = module_logits(model, text).argmax(-1)
    return float((text[:, 6:] == likeliest[:, 5:-1]).float().mean())


@pytest.mark.parametrize("kind", ["roberta", Failing, Late])
def test_a_decoder_whose_cache_cannot_be_used_is_sampled_by_whole_sequences(kind: Any):
    model = tiny_transformer(kind) if kind == "roberta" else gpt2(kind)
    text, told = drawn(model)
    assert share_of_likeliest(model, text) == 1.0
    assert told == [SLOW]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "deepseek", "lfm2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_reason_to_leave_the_cache(family: str, dtype: torch.dtype):
    model = tiny_transformer(family).to(dtype)
    begun = torch.arange(2, 14).view(2, 6)
    assert drawn_by_cache(model, 1.0, begun, 14, seed=0) is not None


def test_memory_that_runs_out_is_no_reason_to_leave_the_cache():
    with pytest.raises(MemoryError):
        drawn(gpt2(Exhausting))


@pytest.mark.parametrize("training", [False, True])
def test_a_decoder_in_training_mode_draws_without_dropout_and_stays_in_its_mode(training: bool):
    model = gpt2(dropout=0.5).train(training)
    text, told = drawn(model)
    assert share_of_likeliest(model, text) == 1.0 and not told
    assert all(part.training is training for part in model.modules())


def test_the_distance_knows_no_constants_and_no_masked_tokens():
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    masked, lower = logits.clone(), logits.clone()
    masked[..., 7], lower[..., 7] = -1e9, -torch.inf
    assert distance(logits + 4.0, logits) < 1e-5
    assert distance(masked, lower) == 0.0
    assert distance(logits, masked) > 0.1 and distance(logits[:2], logits) == torch.inf
    assert 0.9 < distance(torch.zeros_like(logits), logits) < 1.1
