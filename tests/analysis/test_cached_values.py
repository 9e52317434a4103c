"""The size of the KV cache, as the graph says it, next to what attentions and transformers keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.cache_size import CacheSize
from dispfx.run.cached_bytes import cached_bytes, confirmed_cache
from tests.analysis.test_attention_heads import (
    HEADS,
    PATTERNS,
    SIZE,
    WIDTH,
    OneKey,
    Projections,
    found,
    rectified,
)
from tests.tiny_transformers import tiny_transformer

# Bytes of a number in float32.
FLOAT = 4
_ODD = ("latent", "scores mixed over heads")


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in _ODD])
def test_keys_and_values_follow_the_heads_before_they_are_repeated(name: str):
    """Rules 1 and 3."""
    make, features = PATTERNS[name]
    _, program = found(make)
    (site,) = [one for one in program.sites if one.kind == "heads"]
    each = 2 * SIZE * FLOAT
    assert program.cache == CacheSize(0, {site.name: (each,) * features})


def test_keys_that_no_site_cuts_stay():
    """Rule 3: values alone have heads where a matrix combines the scores."""
    _, program = found(PATTERNS["scores mixed over heads"][0])
    assert program.cache is not None
    assert program.cache.fixed == HEADS * SIZE * FLOAT and program.cache.dense == 2 * HEADS * SIZE * FLOAT


def test_one_key_and_one_value_of_all_heads_stay():
    """Rule 1: they are repeated for every head, and kept once."""
    _, program = found(OneKey)
    assert program.cache == CacheSize(2 * SIZE * FLOAT, {})


def test_the_size_is_the_same_where_heads_are_not_asked_for():
    make, features = PATTERNS["grouped by expand"]
    program = dispfx.capture(found(make)[0])
    assert program.cache == CacheSize(2 * features * SIZE * FLOAT, {})


class Sharing(nn.Module):
    """Layers that all read the keys and values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.query = nn.ModuleList(nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(HEADS * SIZE, WIDTH) for _ in range(3))
        self.key, self.value = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(2))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        split = (*ids.shape, HEADS, SIZE)
        k, v = (part(x).view(split).transpose(1, 2) for part in (self.key, self.value))
        for query, out in zip(self.query, self.out, strict=True):
            q = query(F.layer_norm(x, (WIDTH,))).view(split).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        return self.head(x)


def test_layers_that_share_a_cache_keep_it_once():
    """Rule 2: and one selection of heads cuts it."""
    torch.manual_seed(0)
    program = dispfx.capture(Sharing(), sites="heads")
    (site,) = [one for one in program.sites if one.kind == "heads"]
    assert program.cache == CacheSize(0, {site.name: (2 * SIZE * FLOAT,) * HEADS})


def of_one_value(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, v, v, is_causal=True)


def test_a_value_that_is_the_key_as_well_is_kept_as_both():
    _, program = found(lambda: Projections(of_one_value, HEADS))
    assert program.cache is not None and program.cache.dense == 2 * HEADS * SIZE * FLOAT


def with_a_prefix(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One more key and value than there are tokens."""
    first = part.scale.expand(*k.shape[:2], 1, SIZE)
    k, v = (torch.cat([first, one], 2) for one in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def with_a_prefix_written_out(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = part.scale.expand(*k.shape[:2], 1, SIZE)
    k, v = (torch.cat([first, one], 2) for one in (k, v))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "reason"), [(with_a_prefix, "no fixed size"), (with_a_prefix_written_out, "are not known")]
)
def test_keys_that_are_not_one_per_token_make_the_size_unknown(attend: Any, reason: str):
    """Rule 5."""
    _, program = found(lambda: Projections(attend, HEADS))
    assert program.cache is not None and reason in program.cache.unknown


def test_a_latent_may_be_what_is_cached():
    """Rule 6: without a cache to compare with, the size is not known."""
    _, program = found(PATTERNS["latent"][0])
    assert program.cache is not None and "latent" in program.cache.unknown


def test_a_branch_without_an_attention_takes_nothing():
    program = dispfx.capture(found(lambda: Projections(rectified, HEADS))[0])
    assert program.cache == CacheSize()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "neox", "gemma3", "lfm2"])
def test_transformers_caches_what_the_graph_says(name: str):
    """Rule 4: a layer with a sliding window (gemma3) counts like any other; a convolution (lfm2) does not."""
    model = tiny_transformer(name)
    program = dispfx.capture(model, sites="heads")
    assert program.cache is not None and not program.cache.unknown
    assert program.cache.dense == cached_bytes(model)
    assert confirmed_cache(program, model) == program.cache


def test_a_cache_of_latents_is_known_as_a_whole():
    model = tiny_transformer("deepseek")
    size = confirmed_cache(dispfx.capture(model, sites="heads"), model)
    assert size is not None and not size.by_site
    assert size.fixed == cached_bytes(model) == 2 * (10 + 4) * FLOAT, "two layers of latent and rotated key"
    assert "caches 112 bytes per token" in size.unaffected
