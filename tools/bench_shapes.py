#!/usr/bin/env python3
"""Measure the speed of decoders of known shapes, pruned and dense, with random weights.

    python tools/bench_shapes.py --out bench                                all sections, on a GPU
    python tools/bench_shapes.py --out bench --sections check,main          some
    python tools/bench_shapes.py --out bench --shape tiny --device cpu --dtype float32 --scale 0.05

Sections: short (the table's rows with the fewest variants, for a few minutes) and heads (the same with and
without heads among what is pruned), neither of them by default;
check (kernels and static caches against their references), main (the rows of the 13B
table), profile (one layer, kernel by kernel), more (other ratios), align (what alignment costs), sweep
(every ratio and batch), shapes (other decoders).  Only layers are run, with a vocabulary of 512 and so next
to no head; --vocabulary runs the head too.  Dense and pruned decoders go through the same passes, are
compiled in the same way, and take turns.  OUT/speed.md and OUT/speed.json are written after every row.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import decoder_shapes as shapes
from layer_profile import profile_markdown, profile_step

from dispfx.api.benching import experts_for
from dispfx.benchmark.decoder_speed import Contender, Mode, compare
from dispfx.benchmark.speed_row import SpeedRow
from dispfx.benchmark.timing import device_name
from dispfx.ir.cached_inputs import CachedShape, cache_tensors
from dispfx.ir.program import Program
from dispfx.report.speed import speed_line, write_speed
from dispfx.settings.sections import FurtherSites
from dispfx.source.experts import Experts

SECTIONS = ("short", "heads", "check", "main", "profile", "more", "align", "sweep", "shapes")
OTHER_SHAPES = ("llama-2-7b", "qwen3-8b", "phi-2", "mixtral-8x7b")
ALIGNMENTS = (1, 8, 16, 64, 128)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)
BATCHES = (1, 8, 32, 128)
ALL = ("library", "generated")


@dataclass
class Bench:
    """One run of the tool: its options, and what was measured so far."""

    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    rows: list[SpeedRow] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self.args.budget_seconds - (time.perf_counter() - self.began)

    def scaled(self, tokens: int) -> int:
        """Return a length, smaller where a slow machine only tries the tool."""
        return max(2, int(tokens * self.args.scale))

    def row(
        self, name: str, dense: Contender, pruned: Contender, shape: CachedShape, *,
        mode: Mode = "compiled", kernels: Sequence[str] = ("library",),
    ) -> None:  # fmt: skip
        """Measure one row, print it and write everything so far; leave it out when time is up."""
        if self.seconds_left < self.args.row_seconds:
            print(f"left out, time is up: {name} {tuple(shape)}", flush=True)
            return
        row = compare(
            name,
            dense,
            pruned,
            shape,
            mode,
            kernels=kernels,
            rounds=self.args.rounds,
        )
        self.rows.append(row)
        print(f"{self._clock()} {speed_line(row)}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the tables and the pages."""
        write_speed(Path(self.args.out), self.rows, self._facts(), self.pages)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Let one failure cost what it concerns and nothing else."""
        try:
            yield
        except Exception as error:
            print(f"{self._clock()} FAILED {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            self.pages.append(f"FAILED {what}:\n```\n{traceback.format_exc()[-3000:]}\n```")
            self.write()

    def _clock(self) -> str:
        return f"[{time.perf_counter() - self.began:5.0f} s]"

    def _facts(self) -> dict[str, str]:
        layers = self.args.layers
        return {
            "device": device_name(self.device),
            "torch": torch.__version__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "decoder": f"{layers} layers with random weights; the head gives {self.args.vocabulary} logits, "
            "on the last position of a prefill",
            "plan": f"widths repeat every {self.args.period} layers and are multiples of {self.args.align} "
            "unless a row says otherwise; indices are random in every layer",
            "compiled": "torch.compile and a CUDA graph for dense and pruned, fused projections on both; "
            "the fastest of the tried kernels counts; ᵍ: products by kernels that the compiler made",
        }


def main() -> None:
    args = parse_arguments()
    bench = Bench(args, torch.device(args.device), getattr(torch, args.dtype))
    for section in args.sections.split(","):
        if section not in SECTIONS:
            sys.exit(f"{section!r} is no section; they are {', '.join(SECTIONS)}")
    for section in args.sections.split(","):
        print(f"== {section}", flush=True)
        with bench.guarded(section):
            globals()[f"run_{section}"](bench)
    bench.write()
    failed = sum(row.dense is None for row in bench.rows) + sum("FAILED" in page for page in bench.pages)
    print(f"{len(bench.rows)} rows, {failed} without figures", flush=True)


def run_short(bench: Bench) -> None:
    """The rows of the table, the most important first; tuning the compiler's own products comes last."""
    dense, pruned = pair(bench, bench.args.shape, bench.args.layers, 0.5)
    name = f"{bench.args.shape}, {share(pruned)} removed"
    bench.row(name, dense, pruned, prefill(bench, 1, 2048))
    bench.row(name, dense, pruned, decode(bench, 1, 1024))
    bench.row(name, dense, pruned, decode(bench, 64, 256))
    for shape in (decode(bench, 1, 1024), prefill(bench, 1, 2048)):
        for side, one in (("pruned", pruned), ("dense", dense)):
            profile(bench, side, one, shape, "library")
    for ratio in (0.3, 0.2, 0.1):
        _, less = pair(bench, bench.args.shape, bench.args.layers, ratio)
        name = f"{bench.args.shape}, {share(less)} removed"
        bench.row(name, dense, less, prefill(bench, 1, 2048))
        bench.row(name, dense, less, decode(bench, 1, 1024))
    for batch in BATCHES[1:]:
        bench.row(name, dense, less, decode(bench, batch, 256))
    name = f"{bench.args.shape}, {share(pruned)} removed"
    bench.row(name, dense, pruned, prefill(bench, 1, 2048), kernels=("layers",))
    bench.row(name, dense, pruned, decode(bench, 1, 1024), kernels=("generated",))


def run_heads(bench: Bench) -> None:
    """The rows of the table without and with key/value heads among what is pruned."""
    for ratio in (0.5, 0.3):
        both: tuple[tuple[FurtherSites, ...], ...] = (("heads",), ())
        for sites in both:
            dense, pruned = pair(bench, bench.args.shape, bench.args.layers, ratio, sites=sites)
            name = f"{bench.args.shape}, {share(pruned)} removed, cache {cache_share(dense, pruned):.0%}"
            for shape in (decode(bench, 64, 256), decode(bench, 1, 1024), prefill(bench, 1, 2048)):
                bench.row(name, dense, pruned, shape)


def cache_share(dense: Contender, pruned: Contender) -> float:
    """Return the share of the dense decoder's KV cache that the pruned one has."""
    kept, whole = (
        sum(cache.heads * cache.size for cache in cache_tensors(one.reference.graph))
        for one in (pruned, dense)
    )
    return kept / whole


def run_check(bench: Bench) -> None:
    """Compare kernels and static caches with their references on this device."""
    from speed_checks import all_checks

    for name, error, tolerance in all_checks(bench.device, bench.dtype):
        verdict = "ok" if error <= tolerance else "FAILED"
        print(f"{verdict} {name}: error {error:.1e}, at most {tolerance:.0e}", flush=True)
        bench.pages.append(f"- check {name}: error {error:.1e}, at most {tolerance:.0e}: {verdict}")


def run_main(bench: Bench) -> None:
    """The rows of the table: 50 % removed."""
    dense, pruned = pair(bench, bench.args.shape, bench.args.layers, 0.5)
    name = f"{bench.args.shape}, {share(pruned)} removed"
    bench.row(name, dense, pruned, prefill(bench, 1, 2048))
    bench.row(name, dense, pruned, decode(bench, 1, 1024), kernels=ALL)
    bench.row(name, dense, pruned, decode(bench, 64, 256))
    bench.row(name, dense, pruned, prefill(bench, 1, 2048), mode="eager")
    bench.row(name, dense, pruned, decode(bench, 1, 1024), mode="eager")


def run_profile(bench: Bench) -> None:
    """One layer of the pruned decoder, kernel by kernel."""
    if bench.device.type != "cuda":
        print("a profile needs a GPU")
        return
    dense, pruned = pair(bench, bench.args.shape, bench.args.layers, 0.5)
    for shape, kernels in ((decode(bench, 1, 1024), ALL), (prefill(bench, 1, 2048), ("library",))):
        for kind in kernels:
            for name, one in (("dense", dense), ("pruned", pruned)):
                profile(bench, name, one, shape, kind)


def profile(bench: Bench, side: str, one: Contender, shape: CachedShape, kind: str) -> None:
    """Add the kernels of one step to the pages; leave it out when time is up, or without a GPU."""
    if bench.device.type != "cuda" or bench.seconds_left < bench.args.row_seconds:
        return
    with bench.guarded(f"profile {side} {kind}"):
        page = profile_markdown(f"{side}, {kind}", one, shape, profile_step(one.fast, shape, kind))
        bench.pages.append(page)
        bench.write()
        print(page, flush=True)


def run_more(bench: Bench) -> None:
    """30 % and 20 % removed."""
    for ratio in (0.3, 0.2):
        dense, pruned = pair(bench, bench.args.shape, bench.args.layers, ratio)
        name = f"{bench.args.shape}, {share(pruned)} removed"
        bench.row(name, dense, pruned, prefill(bench, 1, 2048))
        bench.row(name, dense, pruned, decode(bench, 1, 1024), kernels=ALL)


def run_align(bench: Bench) -> None:
    """50 % removed at several alignments."""
    for align in ALIGNMENTS:
        with bench.guarded(f"align {align}"):
            dense, pruned = pair(bench, bench.args.shape, bench.args.period, 0.5, align=align)
            name = f"{bench.args.shape}, {share(pruned)} removed, widths × {align}"
            bench.row(name, dense, pruned, prefill(bench, 1, 2048))
            bench.row(name, dense, pruned, decode(bench, 1, 1024))


def run_sweep(bench: Bench) -> None:
    """Decode at every ratio and batch."""
    for batch in BATCHES:
        for ratio in RATIOS:
            dense, pruned = pair(bench, bench.args.shape, bench.args.period, ratio)
            bench.row(
                f"{bench.args.shape}, {share(pruned)} removed", dense, pruned, decode(bench, batch, 256)
            )


def run_shapes(bench: Bench) -> None:
    """Other decoders, 50 % removed."""
    for shape in bench.args.shapes:
        with bench.guarded(shape):
            layers = 2 if shape.startswith("mixtral") else bench.args.period
            for step in (prefill(bench, 1, 2048), decode(bench, 1, 1024)):
                _captured.cache_clear()
                dense, pruned = pair(bench, shape, layers, 0.5, experts=experts_for(step))
                name = f"{shape}, {layers} layers, {share(pruned)} removed"
                bench.row(name, dense, pruned, step)


def pair(
    bench: Bench,
    shape: str,
    layers: int,
    ratio: float,
    *,
    align: int | None = None,
    experts: Experts = "batched",
    sites: tuple[FurtherSites, ...] = (),
) -> tuple[Contender, Contender]:
    """Return the dense and the pruned decoder."""
    program = _captured(shape, layers, bench.args.vocabulary, bench.device, bench.dtype, experts, sites)
    args = bench.args
    plans = [
        shapes.periodic_plan(program, wanted, period=args.period, align=align or args.align)
        for wanted in (0.0, ratio)
    ]
    dense, pruned = (shapes.contender(program, plan) for plan in plans)
    return dense, pruned


@cache
def _captured(
    shape: str,
    layers: int,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
    experts: Experts,
    sites: tuple[FurtherSites, ...],
) -> Program:
    program = shapes.captured(shapes.config_of(shape, layers, vocabulary), device, dtype, experts, sites)
    shapes.fill(program)
    return program


def share(pruned: Contender) -> str:
    """Return the share of the gated weights that is really removed."""
    return f"{pruned.removed:.1%}"


def prefill(bench: Bench, batch: int, tokens: int) -> CachedShape:
    return CachedShape(batch, bench.scaled(tokens), 0)


def decode(bench: Bench, batch: int, past: int) -> CachedShape:
    return CachedShape(batch, 1, bench.scaled(past))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., object] = parser.add_argument
    add("--out", required=True, help="folder for speed.md and speed.json")
    add("--sections", default=",".join(SECTIONS[2:]), help="comma-separated, in the order to run")
    add("--shape", default="llama-2-13b", choices=sorted(shapes.SHAPES), help="decoder of the main rows")
    add("--shapes", nargs="+", default=OTHER_SHAPES, choices=sorted(shapes.SHAPES), help="of that section")
    add("--layers", type=int, default=8, help="layers of the main rows")
    add("--period", type=int, default=4, help="after how many layers widths repeat; layers of the sweep")
    add("--align", type=int, default=128, help="widths are multiples of this")
    add("--vocabulary", type=int, default=512, help="tokens that the head gives logits for")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--rounds", type=int, default=7, help="turns of each decoder")
    add("--scale", type=float, default=1.0, help="multiplies every length, to try the tool on a slow machine")
    add("--budget-seconds", type=float, default=540.0, help="stop starting rows when this is nearly over")
    add("--row-seconds", type=float, default=45.0, help="time that a row may take")
    return parser.parse_args()


if __name__ == "__main__":
    main()
