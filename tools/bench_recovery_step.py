#!/usr/bin/env python3
"""Measure a step of learning masks and a step of recovery on a decoder of a known shape, with random weights.

    python tools/bench_recovery_step.py --out DIR                        7B, 30% removed, on CUDA
    python tools/bench_recovery_step.py --out DIR --shape tiny --device cpu --batch-size 1 --seq-len 32

A step of learning is the default's; a step of recovery is all of it: the dense decoder's pass, the pruned
decoder's passes, the optimizer (AdamW on float32 copies), computed as a
run of --of-steps would compute it.  Times are medians; memory is the most that was
allocated in one step, with everything that the run holds.  The table is in recovery_step.json and
recovery_step.md.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decoder_shapes import LAYERS, SHAPES, config_of, fill, vocabulary_of, zeros_decoder

from dispfx.compiler.pipelines import for_recovery
from dispfx.compiler.programs import capture, lower_program
from dispfx.fast_decoder.recovery_pass import fastest_pass
from dispfx.ir.program import Program
from dispfx.learning.distillation import Keeping, RecoveryTask, recover
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch, learn
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.run.folder_report import device_name, versions
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of, task_of
from dispfx.run.students import graph_predictions
from dispfx.run.trainables import graph_trainable
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.sections import ALIGNMENT

KINDS = ("learn", "scales", "weights")
_WARM = 3


class Enough(Exception):
    """Ends a run that has been measured."""


class Steps:
    """Ends of steps, and the most memory that one took."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._ends = args, [time.perf_counter()]

    def ended(self, step: object) -> None:
        """Note the end of a step; after enough of them, raise `Enough`."""
        cuda = self._args.device.startswith("cuda")
        if cuda:
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if cuda and len(self._ends) == _WARM:
            torch.cuda.reset_peak_memory_stats()
        if len(self._ends) > self._args.steps:
            raise Enough

    def row(self, kind: str) -> dict[str, Any]:
        """Return what was measured."""
        times = [after - before for before, after in pairwise(self._ends[_WARM:])]
        cuda = self._args.device.startswith("cuda")
        if cuda:
            torch.cuda.empty_cache()
        # What a CUDA graph uses again and again is reserved and not allocated while it does not run.
        peak = max(torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()) if cuda else 0
        return {"kind": kind, "milliseconds": 1e3 * statistics.median(times), "gib": peak / 2**30}


def main() -> int:
    """Measure and write every kind; 1 where one failed."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    program = _dense(args)
    generator = torch.Generator().manual_seed(1)
    tokens = 8 * args.batch_size * args.seq_len
    ids = torch.randint(program.vocabulary_size, (tokens,), generator=generator)
    rows: list[dict[str, Any]] = []
    for kind in args.kinds:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        steps = Steps(args)
        try:
            (_learn if kind == "learn" else _recover)(args, program, ids, steps, kind)
        except Enough:
            rows.append(steps.row(kind))
        except Exception as error:
            rows.append({"kind": kind, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        _write(args, rows)
        print(rows[-1], flush=True)
    return int(any("error" in row for row in rows))


def _dense(args: argparse.Namespace) -> Program:
    layers = args.layers or LAYERS[args.shape]
    config = config_of(args.shape, layers, vocabulary_of(args.shape))
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    program = capture(zeros_decoder(config, torch.device(args.device), dtype))
    fill(program)
    return program


def _learn(args: argparse.Namespace, program: Program, ids: torch.Tensor, steps: Steps, kind: str) -> None:
    settings = LearnSettings(
        steps=args.steps + 5, seq_len=args.seq_len, batch_size=args.batch_size, objective=args.objective
    )
    text = batches_of(ids, settings)
    prepared = prepared_loss(program, text, settings, ComputeSettings())
    learn(
        task_of(program, prepared, text, Budget(args.ratio, "blocks", _alignment(args)), settings),
        Watch(on_step=steps.ended),
    )


def _recover(args: argparse.Namespace, program: Program, ids: torch.Tensor, steps: Steps, kind: Any) -> None:
    sizes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    settings = RecoverySettings(train=kind, steps=args.of_steps, measure_every=args.of_steps, **sizes).fitted(
        args.seq_len
    )
    plan = Plan.random(program, args.ratio, 0, align=_alignment(args))
    lowered = lower_program(program, plan)
    teacher = for_recovery(program, args.seq_len)
    teacher.graph_module.requires_grad_(False)
    made = graph_trainable(lowered, plan, settings)
    text = TokenBatches(ids, args.seq_len, args.batch_size, 0)
    task = RecoveryTask(
        student=made.student,
        teacher=graph_predictions(teacher, with_stream=bool(settings.stream_weight)),
        decoder="random",
        text=text,
        held_out=[text.batch(0)[:1]],
        settings=settings,
        device=program.device,
    )
    with tempfile.TemporaryDirectory() as state:
        task = replace(task, faster=fastest_pass(task, program.dtype, lambda text: print(f"  {text}")))
        recover(task, Keeping(Path(state), on_step=steps.ended))


def _alignment(args: argparse.Namespace) -> int:
    """Return what widths are multiples of: products of other widths are several times slower on a GPU."""
    return ALIGNMENT[torch.device(args.device).type]


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    device = device_name(torch.device(args.device))
    about = {"command": " ".join(sys.argv), "device": device, "versions": versions()}
    found = json.dumps({"facts": about, "rows": rows}, indent=1) + "\n"
    (args.out / "recovery_step.json").write_text(found, encoding="utf-8")
    head = f"{args.shape}, {args.ratio:.0%} removed, {args.batch_size} × {args.seq_len} tokens, "
    head += f"objective {args.objective}, {device}"
    lines = [head, "", "| step | ms | GiB |", "|---|---:|---:|"]
    lines += [
        f"| {row['kind']} | {row['error'] if 'error' in row else format(row['milliseconds'], '.1f')} | "
        f"{row.get('gib', 0):.1f} |"
        for row in rows
    ]
    (args.out / "recovery_step.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="the shape's by default")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--objective", default="kl", help="of learning masks")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15, help="steps that are measured")
    parser.add_argument("--of-steps", type=int, default=5000, help="steps of the recovery: long ones compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
