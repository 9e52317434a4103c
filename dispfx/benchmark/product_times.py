"""How long products of activations with weights take on a device, for `--costs`.

Consecutive products read different copies of the weight, as in a decoder, so that weights are never cached.
Selecting and placing is one gather of each kind over the widest stream.
"""

from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from dispfx.benchmark.timing import compare_times, device_name, recorded
from dispfx.plan.latency_table import LatencyTable

# More than the last cache of any processor that is meant.
_COLD_BYTES = {"cuda": 200_000_000, "cpu": 64_000_000}
_PRODUCTS = 8


def product_times(
    device: torch.device, dtype: torch.dtype, tokens: int, sizes: Sequence[int], *, rounds: int = 5
) -> LatencyTable:
    """Return the times of products of `tokens` rows of activations with weights of all pairs of sizes.

    Args:
        tokens: batch × new tokens of the steps that the result is for.
        sizes: rising; rows and columns of weights.
    """
    seconds = [
        tuple(_product_seconds(device, dtype, tokens, rows, columns, rounds) for columns in sizes)
        for rows in sizes
    ]
    table = LatencyTable(
        device_name(device),
        str(dtype).removeprefix("torch."),
        tokens,
        tuple(sizes),
        tuple(sizes),
        tuple(seconds),
        _selection_seconds(device, dtype, tokens, max(sizes), rounds),
    )
    table.check()
    return table


def _product_seconds(
    device: torch.device, dtype: torch.dtype, tokens: int, rows: int, columns: int, rounds: int
) -> float:
    copies = max(1, min(_PRODUCTS, _COLD_BYTES[device.type] // (rows * columns * dtype.itemsize)))
    weights = [torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(copies)]
    x = torch.randn(tokens, columns, device=device, dtype=dtype)

    def products() -> Tensor | None:
        result = None
        for _, weight in zip(range(_PRODUCTS), cycle(weights), strict=False):
            result = torch.nn.functional.linear(x, weight)
        return result

    (timing,) = compare_times([recorded(products, device)], device, rounds=rounds, round_seconds=0.01)
    return timing.least_seconds / _PRODUCTS


def _selection_seconds(
    device: torch.device, dtype: torch.dtype, tokens: int, width: int, rounds: int
) -> float:
    """Return the time of one selection of half of the features, and of placing as many."""
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    half = torch.arange(0, width, 2, device=device, dtype=torch.int32)
    whole = torch.arange(width, device=device, dtype=torch.int32) // 2
    narrow = x.index_select(1, half)
    calls = [partial(x.index_select, 1, half), partial(narrow.index_select, 1, whole)]
    timings = compare_times(
        [recorded(call, device) for call in calls], device, rounds=rounds, round_seconds=0.01
    )
    return sum(timing.least_seconds for timing in timings)
