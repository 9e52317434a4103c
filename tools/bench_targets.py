#!/usr/bin/env python3
"""Measure how closely constraints of time are met, on decoders of known shapes with random weights.

    python tools/bench_targets.py --device cuda --dtype bfloat16      the 13B shape, 4 layers
    python tools/bench_targets.py --shape tiny --step "prefill 2x64" --constraint "prefill 2x64: 1.2x"

First the times of the steps are measured, as `dispfx costs` does.  Then for every constraint random logits
are hardened under it, and the plan's decoder and the dense one are timed in turn, as `dispfx bench` does.
The table has what was asked for, what the model of the step expected, and what was measured.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import decoder_shapes as shapes

from dispfx.benchmark.decoder_speed import Mode, compare
from dispfx.benchmark.step_times import Timed, step_times
from dispfx.benchmark.timing import device_name
from dispfx.errors import BudgetError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.decoder_count import count_of
from dispfx.plan.hardening import harden
from dispfx.plan.latency_table import LatencyTable
from dispfx.plan.plan import Plan
from dispfx.words.constraint_text import parse_constraint, parse_step

STEPS = ("decode 1@1024", "decode 64@256", "prefill 1x2048")
CONSTRAINTS = tuple(f"{step}: {speed}x" for step in STEPS for speed in ("1.2", "1.4", "1.6"))
_SEED = 1000  # of logits: other plans than those that the times were measured on


def main() -> None:
    args = parse_arguments()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    mode: Mode = args.mode or ("compiled" if device.type == "cuda" else "eager")
    config = shapes.config_of(args.shape, args.layers, args.vocabulary)
    program = shapes.captured(config, device, dtype)
    shapes.fill(program)
    print(f"{args.shape}, {args.layers} layers, {args.dtype}, {mode}, {device_name(device)}", flush=True)
    timed = Timed(program, None, args.align, mode, lambda text: print(f"  {text}", flush=True))
    steps = tuple(step_times(timed, CachedShape(*parse_step(step))) for step in args.step or STEPS)
    table = LatencyTable(device_name(device), args.dtype, 1, (1,), (1,), ((1.0,),), steps=steps)
    print("\n| constraint | removed | expected | measured | of what was asked |\n|---|---|---|---|---|")
    for seed, text in enumerate(args.constraint or CONSTRAINTS):
        budget = Budget(0.0, align=args.align, costs=table, constraints=(text,))
        print(line_of(program, budget, mode, _SEED + seed), flush=True)


def line_of(program: Program, budget: Budget, mode: Mode, seed: int) -> str:
    """Harden random logits under a constraint, time the result, and return a line of the table."""
    (text,) = budget.constraints
    constraint = parse_constraint(text)
    try:
        plan = plan_of(program, budget, seed)
    except BudgetError as error:
        return f"| {text} | {error.problem} | | | |"
    (met,) = plan.met
    shape = CachedShape(*parse_step(text.partition(":")[0]))
    dense, pruned = (shapes.contender(program, one) for one in (Plan.random(program, 0.0, 0), plan))
    on_card = program.device.type == "cuda" and shape.batch == 1
    kernels = ("library", "generated") if on_card else ("library",)
    row = compare(text, dense, pruned, shape, mode, kernels=kernels)
    if row.dense is None or row.pruned is None:
        return f"| {text} | {row.note} | | | |"
    asked = constraint.most(row.dense.seconds)
    found = row.pruned.seconds
    return (
        f"| {text} | {plan.achieved:.1%} | {met.dense / met.left:.3f} × | {row.dense.seconds / found:.3f} × "
        f"({row.dense.seconds * 1e3:.3f} → {found * 1e3:.3f} ms) | {found / asked - 1.0:+.1%} |"
    )


def plan_of(program: Program, budget: Budget, seed: int) -> Plan:
    """Return the plan of random logits under a budget."""
    generator = torch.Generator().manual_seed(seed)
    logits = [
        torch.randn(site.size, generator=generator) + 0.5 * torch.randn((), generator=generator)
        for site in program.sites
    ]
    kept = harden(torch.cat(logits), program.sites, count_of(budget, program), budget)
    return Plan.of(program, budget, kept, seed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="llama-2-13b", choices=[*shapes.SHAPES], help="(%(default)s)")
    add("--layers", type=int, default=4, help="(%(default)s)")
    add("--vocabulary", type=int, default=512, help="tokens: next to no head with few (%(default)s)")
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    add("--mode", choices=["eager", "compiled"], help="compiled on a GPU, eager on a CPU")
    add("--align", type=int, default=16, help="of widths (%(default)s)")
    add("--step", action="append", help=f"to time; may be repeated ({', '.join(STEPS)})")
    add("--constraint", action="append", help="of such a step; may be repeated (1.2, 1.4 and 1.6x of each)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
