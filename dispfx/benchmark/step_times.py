"""The time of a decoder's steps at several sizes, for constraints of time.

    dense decoder ┐
    random plan   ┘→ the same passes → timed in turn      for every ratio, and once with half of the heads

Both sides of a pair take turns, so a point is the time of the dense decoder divided by a speed-up that a
busy machine does not change.  Widths are random around the ratio: the model of a step knows how many
parameters are left, not where.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from dispfx.benchmark.decoder_speed import Contender, Mode, compare
from dispfx.compiler.pipelines import gathered
from dispfx.compiler.programs import lower_program
from dispfx.errors import BudgetError, DispfxError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.plan.hardening import ParameterCount, hard_masks
from dispfx.plan.latency_table import StepTimes
from dispfx.plan.plan import Plan
from dispfx.plan.step_time import rising, seconds_at

RATIOS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
# The plan whose heads are halved, to see what they save.
_OF_HEADS = 0.4


@dataclass(frozen=True, eq=False)
class Timed:
    """A decoder with its cache whose steps are timed.

    Args:
        plain: its program without sites of heads.
        with_heads: the same with them; None where they are not wanted, or none can be removed.
        align: of the widths of random plans.
        mode: how steps run.
        note: told every pair of times.
    """

    plain: Program
    with_heads: Program | None
    align: int
    mode: Mode
    note: Callable[[str], None] = lambda text: None


def step_times(timed: Timed, shape: CachedShape) -> StepTimes:
    """Return the times of a step.

    Raises:
        BudgetError: if nothing can be removed.
        DispfxError: if the step cannot be run.
    """
    program, found = timed.plain, []
    for seed, ratio in enumerate(RATIOS):
        try:
            plan = Plan.random(program, ratio, seed, align=timed.align)
        except BudgetError:
            break  # larger ratios are out of reach, too
        found.append((_left(program, plan), *_pair(timed, program, plan, shape)))
    if len(found) < 2:
        raise BudgetError(
            f"times are measured at ratios from {RATIOS[0]}, and fewer than two of them can be met",
            hint="`dispfx inspect` says what stays dense",
        )
    found.sort()
    dense = median(whole for _, whole, _ in found)
    times = StepTimes(
        shape.batch,
        shape.tokens,
        shape.past,
        timed.mode,
        program.size,
        dense,
        tuple(left for left, _, _ in found),
        rising([dense * pruned / whole for _, whole, pruned in found]),
    )
    return times if timed.with_heads is None else _with_heads(timed, times, timed.with_heads, shape)


def _with_heads(timed: Timed, times: StepTimes, program: Program, shape: CachedShape) -> StepTimes:
    """Return the times with what half of the heads save beyond their weights."""
    heads = [site for site in program.sites if site.kind == "heads" and site.size > 1]
    if not heads:
        return times
    kept = dict(Plan.random(timed.plain, _OF_HEADS, 0, align=timed.align).kept)
    kept |= {site.name: torch.arange(site.size) for site in program.sites if site.kind == "heads"}
    kept |= {site.name: torch.arange(site.size // 2) for site in heads}
    plan = Plan.from_masks(program, kept)
    whole, pruned = _pair(timed, program, plan, shape)
    removed = 1.0 - sum(site.size // 2 for site in heads) / sum(site.size for site in heads)
    saved = seconds_at(times, _left(program, plan)) - times.dense_seconds * pruned / whole
    return replace(times, cache_seconds=max(0.0, saved / removed))


def _left(program: Program, plan: Plan) -> int:
    count = ParameterCount.of_sites(program.sites, program.shapes, "total")
    return count.count_kept(hard_masks(program.sites, plan.for_sites(program.sites)))


def _pair(timed: Timed, program: Program, plan: Plan, shape: CachedShape) -> tuple[float, float]:
    """Return the seconds of the dense decoder and of the one that a plan cuts, timed in turn."""
    sides = [_contender(program, one) for one in (Plan.random(program, 0.0, seed=0), plan)]
    on_card = program.device.type == "cuda" and shape.batch == 1
    kernels = ("library", "generated") if on_card else ("library",)
    row = compare("", sides[0], sides[1], shape, timed.mode, kernels=kernels)
    if row.dense is None or row.pruned is None:
        raise DispfxError(f"a step cannot be timed: {row.note}")
    seconds = row.dense.least_seconds, row.pruned.least_seconds
    timed.note(
        f"{row.kind} of {shape.batch} × {max(shape.tokens, shape.past)} tokens, {plan.achieved:.0%} removed: "
        f"{seconds[0] * 1e3:.3f} → {seconds[1] * 1e3:.3f} ms"
    )
    return seconds


def _contender(program: Program, plan: Plan) -> Contender:
    reference = lower_program(program, plan)
    return Contender(reference, gathered(reference), plan.achieved)
