"""Compare the plans of a family with plans that were learned for one ratio each, on a held-out text.

    python tools/family_quality.py MODEL --data text.txt --eval-data test.txt --steps 1500 --device cuda

All runs take the same number of steps of the same text.  KL divergence from the dense decoder and perplexity
are those of hard masks on the first windows of the held-out text, which equal the lowered decoder's.  Prints
one row per plan, and writes the family as OUT/family.safetensors.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from dispfx.distributed.ranks import ALONE
from dispfx.learning.trainer import Watch
from dispfx.plan.hardening import hard_masks
from dispfx.plan.plan import Plan
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import learn_family_within, learn_within
from dispfx.run.readiness import Ready, ready_to_learn
from dispfx.run.timed_stages import Stages
from dispfx.settings import RunSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", action="append")
    parser.add_argument("--eval-data", action="append")
    parser.add_argument("--range", default="0.1:0.6")
    parser.add_argument("--ratios", default="0.2,0.3,0.4,0.5")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--windows", type=int, default=24, help="of the held-out text")
    parser.add_argument("--align", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    chosen = {
        name: getattr(args, name) for name in ("data", "eval_data", "steps", "align", "dtype", "device")
    }
    given = {name: value for name, value in chosen.items() if value is not None}

    def ready(ratio: str | float) -> tuple[RunSettings, Ready]:
        settings = RunSettings.of(model=args.model, ratio=ratio, out=args.out / "none", **given)
        return settings, ready_to_learn(settings, Stages())

    settings, of_range = ready(args.range)
    measure = measuring(of_range, settings, args.windows)
    print(f"{'plan':8} ratio  removed  KL      perplexity  learned in")
    began = time.perf_counter()
    family = learn_family_within(of_range.job(settings.compute, ALONE), Watch())
    seconds = time.perf_counter() - began
    args.out.mkdir(parents=True, exist_ok=True)
    family.save(args.out / "family.safetensors")
    ratios = [float(ratio) for ratio in args.ratios.split(",")]
    for ratio in ratios:
        report("family", family.at(of_range.program, ratio), measure, seconds)
    settings, alone = ready(ratios[0])
    for ratio in ratios:
        began = time.perf_counter()
        job = replace(
            alone.job(settings.compute, ALONE),
            program=of_range.program,
            budget=replace(alone.budget, ratio=ratio),
        )
        plan = learn_within(job, Watch())
        report("single", plan, measure, time.perf_counter() - began)


def measuring(ready: Ready, settings: RunSettings, windows: int) -> Callable[[Plan], tuple[float, float]]:
    """Return what gives KL and perplexity of a plan."""
    program = ready.program
    loss = prepared_loss(program, ready.batches, replace(ready.settings, objective="kl"), settings.compute)
    held_out = [ids_BT.to(program.device) for ids_BT in ready.batches.held_out_batches(windows)]

    @torch.no_grad()
    def measure(plan: Plan) -> tuple[float, float]:
        masks_N = hard_masks(program.sites, plan.for_sites(program.sites), device=program.device)
        kl = sum(float(loss.loss(ids_BT, masks_N)) for ids_BT in held_out)
        likelihood = sum(float(loss.next_token_loss(ids_BT, masks_N)) for ids_BT in held_out)
        return kl / len(held_out), math.exp(likelihood / len(held_out))

    return measure


def report(name: str, plan: Plan, measure: Callable[[Plan], tuple[float, float]], seconds: float) -> None:
    kl, perplexity = measure(plan)
    removed = f"{plan.budget.ratio:<6g} {plan.achieved:.4f}"
    print(f"{name:8} {removed}   {kl:.4f}  {perplexity:<11.3f} {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
