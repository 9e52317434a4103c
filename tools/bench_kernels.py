#!/usr/bin/env python3
"""Measure what each GPU kernel of the project is worth: a figure that users see, with and without it.

    python tools/bench_kernels.py --out DIR                        on a GPU
    python tools/bench_kernels.py --out DIR --tiny --device cpu    the same rows at sizes for a test

A kernel stays if it makes some figure at least 5% better.  The rows are four layers of LLaMA-2-13B's shape
with half of the weights removed.  DIR/kernels.md and kernels.json are written after every row.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_shapes

from dispfx.benchmark.decoder_speed import step_call
from dispfx.benchmark.timing import compare_times


@dataclass(frozen=True)
class Row:
    """One figure under one variant, in milliseconds, the lower the better."""

    figure: str
    variant: str
    milliseconds: float | None
    error: str = ""


@contextmanager
def _without(place: str | None) -> Iterator[None]:
    if place is None:
        yield
        return
    with patch(place, lambda *arguments: False):
        yield


def inference_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield prefill and decode steps of a pruned decoder with and without each kernel."""
    options = argparse.Namespace(
        out=args.out, shape="tiny" if args.tiny else "llama-2-13b", layers=2 if args.tiny else 4, period=4,
        align=8 if args.tiny else 16, vocabulary=512, device=args.device,
        dtype="float32" if args.tiny else "bfloat16", rounds=5, scale=0.02 if args.tiny else 1.0,
        budget_seconds=1e9, row_seconds=0.0,
    )  # fmt: skip
    bench = bench_shapes.Bench(options, torch.device(args.device), getattr(torch, options.dtype))
    _, pruned = bench_shapes.pair(bench, options.shape, options.layers, 0.5)
    steps = {
        "prefill 1 × 2048": bench_shapes.prefill(bench, 1, 2048),
        "decode 1 (1024)": bench_shapes.decode(bench, 1, 1024),
        "decode 64 (256)": bench_shapes.decode(bench, 64, 256),
    }
    split = "dispfx.kernels.split_attention.can_split"
    for figure, step in steps.items():
        ways = {"all kernels": None} | ({"without split_attention": split} if step.tokens == 1 else {})
        calls = []
        for place in ways.values():
            with _without(place):
                calls.append(step_call(pruned.fast, step, "compiled"))
        for name, timing in zip(ways, compare_times(calls, bench.device, rounds=7), strict=True):
            yield Row(figure, name, 1e3 * timing.median_seconds)


def main() -> None:
    """Measure every row and write each as soon as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.md and kernels.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    args = parser.parse_args()
    rows, began = [], time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    for row in inference_rows(args):
        rows.append(row)
        print(f"[{time.perf_counter() - began:4.0f} s] {_line(row, rows)}", flush=True)
        _write(args.out, rows)


def _line(row: Row, rows: list[Row]) -> str:
    if row.milliseconds is None:
        return f"| {row.figure} | {row.variant} | failed: {row.error[:200]} | |"
    base = [
        r.milliseconds
        for r in rows
        if r.figure == row.figure and r.variant == "all kernels" and r.milliseconds
    ]
    share = f"{row.milliseconds / statistics.median(base) - 1:+.1%}" if base else ""
    return f"| {row.figure} | {row.variant} | {row.milliseconds:.3f} ms | {share} |"


def _write(out: Path, rows: list[Row]) -> None:
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    head = [f"{card}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", "",
            "| figure | variant | time | against all kernels |", "|---|---|---|---|"]  # fmt: skip
    page = "\n".join([*head, *(_line(row, rows) for row in rows)]) + "\n"
    (out / "kernels.md").write_text(page, encoding="utf-8")
    (out / "kernels.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
