"""Attention of new tokens over the places of a static cache that are in use.

    dispfx::cached_attention(query, keys, values, start, scale)

Query t, at position start + t, reads the places 0 … start + t.  `reference` is what the operation means:
plain attention with a mask.  It runs everywhere, and for several new tokens.  A single new token on a GPU
runs the kernels of `dispfx.kernels.split_attention`, which read the places in use and no others; a mask
keeps `scaled_dot_product_attention` off the kernels that would do the same.

Shape legend: B batch, H query heads, G key heads, T new tokens, S places, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CACHED_ATTENTION", "cached_attention", "reference"]


@torch.library.custom_op("dispfx::cached_attention", mutates_args=())
def cached_attention(
    query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float | None = None
) -> Tensor:
    """Return the attention of T new tokens, (B, H, T, D).

    Args:
        query: (B, H, T, D).
        keys, values: (B, G, S, D), H a multiple of G; the new tokens' places are filled already.
        start: () int64, the position of the first new token.
        scale: of the products; 1 / √D by default.
    """
    return _as_laid_out(reference(query, keys, values, start, scale))


@cached_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float | None = None) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty((batch, tokens, heads, values.shape[-1])).transpose(1, 2)


@cached_attention.register_kernel("cuda")
def _(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float | None = None) -> Tensor:
    from dispfx.kernels.split_attention import can_split, split_attention

    if can_split(query, keys, values):
        return split_attention(query, keys, values, start, scale)
    return _as_laid_out(reference(query, keys, values, start, scale))


def reference(
    query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float | None = None
) -> Tensor:
    """As `cached_attention`, by `scaled_dot_product_attention` with a mask."""
    places = torch.arange(keys.shape[2], device=keys.device)
    positions = torch.arange(query.shape[2], device=keys.device) + start
    allowed = places <= positions[:, None]
    shared = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=allowed, scale=scale, enable_gqa=shared
    )


def _as_laid_out(result: Tensor) -> Tensor:
    """Return (B, H, T, D) with the heads of a token adjacent in memory, for the output projection."""
    return result.transpose(1, 2).contiguous().transpose(1, 2)


CACHED_ATTENTION = torch.ops.dispfx.cached_attention.default
