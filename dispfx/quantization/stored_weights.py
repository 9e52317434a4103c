"""Rounded weights as a checkpoint stores them, in the format compressed-tensors, which vLLM reads.

    int8, int4   weight_packed   codes of 8 or 4 bits in int32 words    weight_scale (N, G)
                 weight_shape    N and K                                weight_zero_point packed, of int4
    fp8          weight          float8 with 4 bits of exponent         weight_scale (N, 1)

The library compressed-tensors packs and unpacks them.  Activations are not rounded.

Shape legend: N outputs, K inputs, G groups of a row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.quantization.rounded_layers import weight_of_layer
from dispfx.quantization.weight_rounding import FLOAT8, Grid, Rounded
from dispfx.words.extras import library

WEIGHT = "weight"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a checkpoint are rounded and stored.

    Args:
        grid: of the weights; `grid_of` sets the dtype of the scales.
        format: its name in compressed-tensors.
    """

    grid: Grid
    format: str

    @property
    def weights(self) -> dict[str, Any]:
        """The arguments of `QuantizationArgs` of compressed-tensors."""
        group = self.grid.group
        return {
            "num_bits": self.grid.bits,
            "type": "float" if self.grid.floating else "int",
            "symmetric": self.grid.symmetric or self.grid.floating,
            "strategy": "channel" if group is None else "group",
            "group_size": group,
            "dynamic": False,
        }

    def grid_of(self, layer: nn.Module) -> Grid:
        """Return the grid of a layer, with scales of its dtype."""
        return replace(self.grid, scales=weight_of_layer(layer).dtype)


SCHEMES = {
    "int8": Scheme(Grid(8, symmetric=True), "pack-quantized"),
    "int4": Scheme(Grid(4, group=32), "pack-quantized"),
    "fp8": Scheme(Grid(8, floating=True), "float-quantized"),
}


def fills_groups(scheme: str, layer: nn.Module) -> bool:
    """Return whether a layer's inputs fill whole groups, which the format needs."""
    group = SCHEMES[scheme].grid.group
    return group is None or weight_of_layer(layer).shape[1] % group == 0


def weights_section(scheme: str, left: Collection[str]) -> dict[str, Any]:
    """Return the entry of a config for engines that read compressed-tensors.

    Args:
        left: paths of linear layers that are not rounded.
    """
    group = {
        "targets": ["Linear"],
        "weights": SCHEMES[scheme].weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": SCHEMES[scheme].format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(left),
    }


def stored_tensors(scheme: str, found: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of one layer as a file stores them, by the last part of their names.

    Args:
        dtype: of the decoder, for the scales.

    Raises:
        DataError: if compressed-tensors is not installed.
    """
    kept = SCHEMES[scheme]
    state = {WEIGHT: found.numbers, "weight_scale": found.scales}
    if not kept.grid.floating:
        # The library's codes are signed.
        state["weight_zero_point"] = (found.zeros - kept.grid.middle).to(torch.int8)
    tensors = _compressor(kept.format).compress(state, _library_scheme(scheme))
    tensors["weight_scale"] = tensors["weight_scale"].to(dtype)
    return tensors


def empty_tensors(scheme: str, weight: Tensor) -> dict[str, Tensor]:
    """Return empty tensors shaped and typed as `stored_tensors` for a weight (N, K), on its device."""
    grid = SCHEMES[scheme].grid
    outputs, inputs = weight.shape
    groups = -(-inputs // grid.of_groups(inputs))
    # Read as it is stored: a product is rounded to the dtype of the weight, and not the scale before it.
    room = {"weight_scale": weight.new_empty(outputs, groups, dtype=torch.float32)}
    if grid.floating:
        return room | {WEIGHT: torch.empty_like(weight, dtype=FLOAT8)}
    words = weight.new_empty(outputs, -(-inputs * grid.bits // 32), dtype=torch.int32)
    room |= {"weight_packed": words, "weight_shape": weight.new_empty(2, dtype=torch.int64)}
    if not grid.symmetric:
        room["weight_zero_point"] = weight.new_empty(-(-outputs * grid.bits // 32), groups, dtype=torch.int32)
    return room


def weight_of(scheme: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) from the stored tensors of one layer.

    Raises:
        DataError: if compressed-tensors is not installed.
    """
    state = dict(tensors)
    # With float32 scales, the products of codes and scales are rounded only once: to `dtype`.
    state["weight_scale"] = state["weight_scale"].float()
    return _compressor(SCHEMES[scheme].format).decompress(state, _library_scheme(scheme))[WEIGHT].to(dtype)


def _library() -> Any:
    return library(
        "compressed_tensors", "quantize", "the library for weights of 8 or 4 bits, compressed_tensors,"
    )


def _compressor(name: str) -> Any:
    return _library().BaseCompressor.get_value_from_registry(name)


def _library_scheme(scheme: str) -> Any:
    parts = _library().quantization
    return parts.QuantizationScheme(
        targets=["Linear"], weights=parts.QuantizationArgs(**SCHEMES[scheme].weights)
    )
