"""A transformers decoder whose cache is a list of plain tensors, so that it can be captured.

    decoder(ids, cache)    →    forward(ids, mask, positions, [k0, v0, …]) → [logits, k0', v0', …]

No architecture is known by name.  One forward pass shows which layers keep keys and values.  A cache with
anything else (the state of a recurrence, a window of a convolution, compressed keys) is rejected.  The cache
of every layer grows without limit, also for sliding-window attention: the mask still hides tokens outside the
window, and all caches have the same length.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dispfx.capturing.cached_capture import CachedForward
from dispfx.capturing.module_capture import embedding_rows, evaluation, token_ids
from dispfx.errors import CaptureError, UnsupportedGraphError, first_line
from dispfx.ir.cached_inputs import CacheTensor

# `past_key_values` is being renamed; newer versions accept the old name with a warning.
_CACHE_ARGUMENTS = ("cache", "past_key_values")
_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer)
# Placeholder for a layer without its own cache; older versions lack it.
_PLACEHOLDER = getattr(cache_utils, "DummyLayer", DynamicLayer)
_SAMPLE = (2, 5)
# Other positions change logits by far more, rounding by far less.
_ALIKE = 1e-3


def cached_forward(model: nn.Module) -> CachedForward:
    """Prepare a decoder for a capture with a cache; the decoder is not changed.

    Raises:
        CaptureError: if it does not take or return a cache.
        UnsupportedGraphError: if its cache does not consist of keys and values (B, heads, tokens, size).
    """
    argument = _cache_argument(model)
    layers = _observed_layers(model, argument)
    module = _CachedModule(model, argument, [_kept_as(layer) for layer in layers], _first_position(model))
    caches = [tensor for index, layer in enumerate(layers) for tensor in _tensors(layer, index)]
    return CachedForward(module, model, "decoder", tuple(caches))


class _CachedModule(nn.Module):
    """A decoder that takes and returns keys and values as a list, layer by layer.

    Args:
        argument: name of the decoder's cache argument.
        kept: for each layer of the cache, None if it holds keys and values, else a placeholder, such as for a
            layer that uses the keys and values of another layer.
        first_position: number of its first position; None if it takes no positions.
    """

    def __init__(
        self, decoder: nn.Module, argument: str, kept: Sequence[type | None], first_position: int | None
    ):
        super().__init__()
        self.decoder = decoder
        self._argument = argument
        self._kept = tuple(kept)
        self._first_position = first_position
        self._accepted = _accepted(decoder)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> list[Tensor]:
        cache: Any = DynamicCache()
        pairs = iter(zip(past[::2], past[1::2], strict=True))
        cache.layers = [_filled(*next(pairs)) if empty is None else empty() for empty in self._kept]
        optional: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": True}
        arguments = {name: value for name, value in optional.items() if name in self._accepted}
        if self._first_position is not None:
            # Adding 0 would be one more operation in every graph.
            first = self._first_position
            arguments["position_ids"] = position_ids + first if first else position_ids
        output = self.decoder(input_ids, **{self._argument: cache}, **arguments)
        layers = [layer for layer, empty in zip(cache.layers, self._kept, strict=True) if empty is None]
        return [output.logits, *(tensor for layer in layers for tensor in _pair(layer))]


def _filled(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _pair(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _accepted(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


def _cache_argument(model: nn.Module) -> str:
    for name in _CACHE_ARGUMENTS:
        if name in _accepted(model):
            return name
    raise CaptureError(
        f"the decoder does not take a cache ({' or '.join(_CACHE_ARGUMENTS)})",
        where=type(model).__name__,
        hint="capture it without a cache",
    )


def _first_position(model: nn.Module) -> int | None:
    """Return the number of the decoder's first position, or None if it takes no positions.

    Most decoders count from 0; some start after the id of the padding token.  A decoder that takes no
    positions counts them from the length of its cache, including padding.
    """
    if "position_ids" not in _accepted(model):
        return None
    ids = _sample_ids(model)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    own = _observed(model, ids, {}).logits
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    for first in (0, *([padding + 1] if isinstance(padding, int) else [])):
        given = _observed(model, ids, {"position_ids": places + first}).logits
        if torch.allclose(own, given, rtol=_ALIKE, atol=_ALIKE * float(own.abs().max())):
            return first
    return None


def _sample_ids(model: nn.Module) -> Tensor:
    return token_ids(model, embedding_rows(model), _SAMPLE)


def _observed(model: nn.Module, ids: Tensor, arguments: dict[str, Any]) -> Any:
    """Return the output of the decoder for token ids with an empty cache."""
    if "use_cache" in _accepted(model):
        arguments = {**arguments, "use_cache": True}
    with evaluation(model, use_cache=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return model(ids, **arguments)
        except Exception as error:
            raise CaptureError(
                f"the decoder must run with a cache; it raised {first_line(error)}",
                where=type(model).__name__,
            ) from error


def _observed_layers(model: nn.Module, argument: str) -> list[Any]:
    """Return the layers of the cache that a forward pass returns."""
    cache = getattr(_observed(model, _sample_ids(model), {}), argument, None)
    # A decoder with cross-attention keeps that cache separately; it is empty here.
    cache = getattr(cache, "self_attention_cache", cache)
    if not isinstance(cache, Cache):
        raise UnsupportedGraphError(
            f"the decoder must return a cache of keys and values; it returns {_kind(cache)}",
            where=type(model).__name__,
            hint="capture it without a cache",
        )
    layers = list(getattr(cache, "layers", []))
    for layer in layers:
        _require_keys_and_values(layer, model)
    if all(_is_empty(layer) for layer in layers):
        raise UnsupportedGraphError("the decoder's cache stays empty", where=type(model).__name__)
    return layers


def _require_keys_and_values(layer: Any, model: nn.Module) -> None:
    """Reject a layer whose cache is not keys and values (B, heads, T, size)."""
    pair = (getattr(layer, "keys", None), getattr(layer, "values", None))
    shapes = [tuple(getattr(tensor, "shape", ())) for tensor in pair]
    regular = all(len(shape) == 4 and (shape[0], shape[2]) == _SAMPLE for shape in shapes)
    if type(layer) not in (*_KEYS_AND_VALUES, _PLACEHOLDER) or not (regular or _is_empty(layer)):
        held = f" with {shapes[0]} and {shapes[1]}" if any(shapes) else ""
        raise UnsupportedGraphError(
            "a layer's cache must be keys and values (batch, heads, tokens, size); this one is "
            f"{_kind(layer)}{held}",
            where=type(model).__name__,
            hint="capture the decoder without a cache",
        )


def _is_empty(layer: Any) -> bool:
    return layer.keys is None or layer.keys.numel() == 0


def _kept_as(layer: Any) -> type | None:
    if not _is_empty(layer):
        return None
    return _PLACEHOLDER if type(layer) is _PLACEHOLDER else DynamicLayer


def _kind(value: Any) -> str:
    return "none" if value is None else f"a {type(value).__name__}"


def _tensors(layer: Any, index: int) -> list[CacheTensor]:
    if _is_empty(layer):
        return []
    return [
        CacheTensor(f"{index}.{name}", tensor.shape[1], tensor.shape[3], tensor.dtype)
        for name, tensor in (("key", layer.keys), ("value", layer.values))
    ]
