#!/usr/bin/env python3
"""Measure how long products take on this device, for `dispfx compile --costs FILE`.

    python tools/measure_costs.py --out h100.json --device cuda --dtype bfloat16 --tokens 64
    python tools/measure_costs.py --out cpu.json --tokens 128 --sizes 64,128,256,512

--tokens is the batch times the new tokens of the steps that the pruned decoder is for: 1 for generating one
text, 2048 for reading long prompts.  The plan keeps the table, so it is measured once.

Consecutive products read different copies of the weight, as in a decoder, so that weights are never cached.
Selecting and placing is one gather of each kind over the widest stream.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from dispfx.benchmark.timing import compare_times, device_name, recorded
from dispfx.files.disk import replacing
from dispfx.plan.latency_table import LatencyTable

SIZES = "256,512,1024,1536,2048,2560,3072,4096,5120,6144,8192,11008,13824"

# More than the last cache of any processor that is meant.
_COLD_BYTES = {"cuda": 200_000_000, "cpu": 64_000_000}
_PRODUCTS = 8


def main() -> None:
    args = parse_arguments()
    sizes = sorted({int(size) for size in args.sizes.split(",")})
    table = measure_costs(torch.device(args.device), getattr(torch, args.dtype), args.tokens, sizes)
    with replacing(Path(args.out)) as partial:
        partial.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
    print(f"{len(sizes)} × {len(sizes)} products on {table.device}: {args.out}")


def measure_costs(
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=1, help="rows of activations")
    parser.add_argument("--sizes", default=SIZES, help="rows and columns of weights, comma-separated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
