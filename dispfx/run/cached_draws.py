"""Sequences that a decoder of transformers draws with its cache, checked against the decoder itself.

With a cache, some decoders of transformers give other logits than without one: their positions begin
elsewhere, or their attention skips other tokens.  Others cannot generate at all.  So the logits that two
sequences of every batch were drawn from are compared with those of the decoder for the whole sequences.

Shape legend: B batch, K tokens of an opening, L tokens of a sequence, S places, R sequences, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.errors import memory_shortage
from dispfx.quality.logits_by_rows import by_rows
from dispfx.source.drawn_tokens import KeptLogits, sample_by_cache

_MOST_PLACES = 64
# What lies further below the largest logit is never drawn; a decoder may mask it with any number.
_LOWEST = -30.0
# Of `distance`.  Rounding gave 2e-6, 0.003 and 0.024 for 32 layers in float32, float16 and bfloat16, and
# decoders whose cache computes something else gave 0.04 and more.
_TOLERANCE = {torch.float64: 5e-3, torch.float32: 5e-3, torch.float16: 0.02}
_HALF_TOLERANCE = 0.05


def drawn_by_cache(
    model: nn.Module, temperature: float, begun_BK: Tensor, new: int, seed: int
) -> Tensor | None:
    """Return sequences (B, K + new), or None if the cache does not give the decoder's own logits.

    Raises:
        CaptureError: if the decoder does not run on the whole sequences.
    """
    size = begun_BK.shape[1]
    places = torch.linspace(size - 1, size + new - 2, min(new, _MOST_PLACES)).long().tolist()
    kept = KeptLogits(places, sorted({0, len(begun_BK) - 1}))
    try:
        ids_BL = sample_by_cache(model, temperature, begun_BK, new, seed, kept)
    except Exception as error:
        if memory_shortage(error) is not None:
            raise
        return None  # the decoder's code may fail in any way
    if ids_BL.shape != (len(begun_BK), size + new):
        return None
    with torch.no_grad():
        whole_SRV = _whole_logits(model, ids_BL[kept.rows], places)
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
    return ids_BL if distance(kept.logits_SRV, whole_SRV) <= tolerance else None


def _whole_logits(model: nn.Module, ids_RL: Tensor, places: Sequence[int]) -> Tensor:
    """Return the logits (S, R, V) at some places of whole sequences, float32 on the CPU."""
    decoder = partial(module_logits, model)
    found: list[Tensor] = []
    start = 0
    for logits_RTV in by_rows(decoder, ids_RL).chunks(ids_RL):
        inside = range(start, start + logits_RTV.shape[1])
        found += [logits_RTV[:, place - start].float().cpu() for place in places if place in inside]
        start = inside.stop
    return torch.stack(found)


def distance(found_SRV: Tensor, expected_SRV: Tensor) -> float:
    """Return how far logits are from the expected ones, relative to the expected ones' standard deviation.

    The mean of all places: in half precision, another choice of experts moves the logits of some tokens far.
    A constant that is added to all logits of a token changes nothing.
    """
    if found_SRV.shape != expected_SRV.shape:
        return float("inf")
    found_SRV, expected_SRV = _levelled(found_SRV), _levelled(expected_SRV)
    spread_SR = expected_SRV.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found_SRV - expected_SRV).norm(dim=-1) / spread_SR).mean())


def _levelled(logits_SRV: Tensor) -> Tensor:
    below_SRV = (logits_SRV - logits_SRV.amax(-1, keepdim=True)).clamp(min=_LOWEST)
    return below_SRV - below_SRV.mean(-1, keepdim=True)
