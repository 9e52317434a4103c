"""The inputs and outputs of a program with a cache: their names, and tensors for them.

    input_ids (B, T), attention_mask (B, P + T), position_ids (B, T), past_key_values.N.key/value
    →   logits (B, T, V), present.N.key/value

The names are those that clients of ONNX decoders expect.
Shape legend: B batch, T new tokens, P cached tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

CACHED_INPUTS = ("input_ids", "attention_mask", "position_ids")


class CachedShape(NamedTuple):
    """How many sequences, new tokens and cached tokens."""

    batch: int
    tokens: int
    past: int


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of a cache, (B, heads, P, size).

    Args:
        name: the layer's number and what it holds, such as `0.key`.
    """

    name: str
    heads: int
    size: int
    dtype: torch.dtype

    @property
    def past(self) -> str:
        """Name of the input."""
        return f"past_key_values.{self.name}"

    @property
    def present(self) -> str:
        """Name of the output."""
        return f"present.{self.name}"

    def empty(self, batch: int, device: torch.device) -> Tensor:
        """Return what a cache holds before the first token, (B, heads, 0, size)."""
        return torch.empty(batch, self.heads, 0, self.size, dtype=self.dtype, device=device)

    def zeros(self, batch: int, places: int, device: torch.device) -> Tensor:
        """Return a cache of a fixed length, (B, heads, S, size)."""
        return torch.zeros(batch, self.heads, places, self.size, dtype=self.dtype, device=device)


def cache_tensors(graph: fx.Graph) -> tuple[CacheTensor, ...]:
    """Return the caches that a graph takes, in the order of its inputs; none where it has no cache."""
    found = []
    for node in graph.nodes:
        prefix, _, rest = node.name.partition("past_key_values_")
        if node.op == "placeholder" and not prefix and rest:
            value = node.meta["val"]
            layer, kind = rest.rsplit("_", 1)
            found.append(CacheTensor(f"{layer}.{kind}", value.shape[1], value.shape[3], value.dtype))
    return tuple(found)


def bytes_per_token(graph: fx.Graph) -> int:
    """Return the bytes that all caches of a graph hold for each token."""
    return sum(cache.heads * cache.size * cache.dtype.itemsize for cache in cache_tensors(graph))


def positions_of(attention_mask: Tensor, tokens: int) -> Tensor:
    """Return the position of each new token among those that are no padding, (B, T) int64.

    Args:
        attention_mask: (B, P + T), 0 at padding; the last `tokens` columns are the new ones.  Padding
            itself is at position 0.
    """
    positions = attention_mask.long().cumsum(-1) - 1
    return positions.clamp(min=0)[:, -tokens:].contiguous()


def sample_inputs(
    caches: Sequence[CacheTensor], shape: CachedShape, vocabulary: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return seeded inputs of a shape; where something is cached, one of the cached tokens is padding."""
    generator = torch.Generator().manual_seed(sum(shape))
    low = min(4, vocabulary - 1)
    ids = torch.randint(low, vocabulary, (shape.batch, shape.tokens), generator=generator).to(device)
    mask = torch.ones(shape.batch, shape.past + shape.tokens, dtype=torch.int64, device=device)
    if shape.past:
        mask[0, 0] = 0
    past = [
        torch.randn(shape.batch, cache.heads, shape.past, cache.size, generator=generator).to(
            device, cache.dtype
        )
        for cache in caches
    ]
    return (ids, mask, positions_of(mask, shape.tokens), *past)


class CachedDecoder:
    """Runs a graph with a cache on consecutive pieces of text, and keeps the cache between calls.

        decoder = CachedDecoder(program.graph_module)
        logits = decoder(prompt_ids, attention_mask)     # prefill, (B, T, V)
        logits = decoder(next_ids)                       # decode, (B, 1, V)

    Args:
        graph: of a cached program, lowered or not; or a function with the same inputs and outputs.
        caches: that such a function takes; a graph describes its own.
    """

    def __init__(
        self, graph: fx.GraphModule | Callable[..., Iterable[Tensor]], caches: Sequence[CacheTensor] = ()
    ):
        self._graph = graph
        self._caches = cache_tensors(graph.graph) if isinstance(graph, fx.GraphModule) else caches
        self.reset()

    def reset(self) -> None:
        """Clear the cache."""
        self._mask: Tensor | None = None
        self._past: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of T new tokens.

        Args:
            ids: (B, T) int64.
            attention_mask: (B, T), 0 at padding, which must be on the left; all ones by default.
        """
        new = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
        if self._mask is None:
            self._past = tuple(cache.empty(len(ids), ids.device) for cache in self._caches)
        self._mask = new if self._mask is None else torch.cat([self._mask, new], dim=1)
        positions = positions_of(self._mask, ids.shape[1])
        logits, *past = self._graph(ids, self._mask, positions, *self._past)
        self._past = tuple(past)
        return logits
