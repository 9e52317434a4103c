"""The bytes that a decoder of transformers caches for each token, as its own cache says."""

from dataclasses import replace

import torch
from torch import nn

from dispfx.ir.cache_size import CacheSize
from dispfx.ir.program import Program

# To find out how much a decoder caches for each.
_CACHED_TOKENS = 2


def cached_bytes(model: nn.Module) -> int | None:
    """Return the bytes of keys and values per token, or None if the decoder has no cache that tells."""
    if getattr(model, "config", None) is None:
        return None
    ids = torch.zeros(1, _CACHED_TOKENS, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        answer = model(ids, use_cache=True)
    # transformers is renaming it.
    cache = getattr(answer, "cache", None) or getattr(answer, "past_key_values", None)
    layers = [
        (getattr(one, "keys", None), getattr(one, "values", None)) for one in getattr(cache, "layers", ())
    ]
    held = [
        tensor for pair in layers for tensor in pair if isinstance(tensor, torch.Tensor) and tensor.numel()
    ]
    return sum(tensor.nbytes for tensor in held) // _CACHED_TOKENS if held else None


def confirmed_cache(program: Program, model: nn.Module) -> CacheSize | None:
    """Return the size of the cache that a program has, as its decoder confirms it.

    Where a decoder caches something else than the keys and values of its attentions, such as latents, the
    bytes of each feature are not known.
    """
    size, measured = program.cache, cached_bytes(model)
    if size is None or measured is None:
        return size
    if measured == size.dense:
        return replace(size, unknown="")
    reason = f"it caches {measured:,} bytes per token, and its attentions read {size.dense:,}"
    return CacheSize(measured, unaffected=reason)
