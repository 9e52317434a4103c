"""What a run would do, as text and as JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispfx.estimate.run_estimate import Estimate
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.plan import CacheLeft, Met
from dispfx.report.estimate import duration, estimate_lines, estimate_plain
from dispfx.report.plans import target_lines, target_plain
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.words.own_function import shown


@dataclass(frozen=True, eq=False)
class Preview:
    """The preview of a run.

    Args:
        program: the decoder, analysed.
        settings: of learning.
        estimate: of its memory and time.
        budget: of the plan.
        recovery: training of the pruned decoder, if it follows.
        reachable: ratio of the widths that meet the budget if all features matter equally; a learned plan
            meets the budget as closely.
        cache: what these widths leave of the KV cache, if the budget names a share of it.
        met: how these widths meet the constraints of the budget.
        parameters: of the decoder.
        parameters_left: of the decoder at those widths.
        tokens: number of tokens to learn from.
        tokens_measured: number of tokens to measure perplexity on.
        cpu_seconds: duration of all steps on this CPU; None if the run is for another device.
        out: output path.
        state: path of the state while the run is incomplete.
        resumes_at: step at which the run would resume, or None if it starts anew.
    """

    program: Program
    settings: LearnSettings
    estimate: Estimate
    budget: Budget
    recovery: RecoverySettings | None
    reachable: float
    cache: CacheLeft | None
    met: tuple[Met, ...]
    parameters: int
    parameters_left: int
    tokens: int
    tokens_measured: int
    cpu_seconds: float | None
    out: Path
    state: Path
    resumes_at: int | None


def preview_lines(found: Preview, written: str) -> list[str]:
    """Return the preview as lines: ratio, text, learning, memory, time and output.

    Args:
        written: description of `out`.
    """
    settings, budget = found.settings, found.budget
    seen = settings.steps * settings.batch_size * settings.seq_len
    missed = found.parameters_left / found.parameters - 1.0
    lines = [
        f"ratio: {budget.ratio:.2%} of {shown(budget.of)} requested, {found.reachable:.2%} possible with "
        f"widths that are multiples of {budget.align}",
        *target_lines(budget, found.cache, found.met),
        f"parameters: {found.parameters:,} → about {found.parameters_left:,} ({missed:+.1%})",
        f"text: {found.tokens:,} tokens to learn from, {found.tokens_measured:,} to measure on",
        f"learning: {settings.steps:,} steps of {settings.batch_size} × {settings.seq_len} tokens, "
        f"{seen / max(found.tokens, 1):.1f} passes over the text",
        *estimate_lines(found.estimate),
    ]
    if found.cpu_seconds is not None:
        lines.append(f"  this CPU: about {duration(found.cpu_seconds)} for {settings.steps:,} steps")
    if found.recovery is not None:
        lines.append(
            f"then recovery, not counted above: {found.recovery.train}, at most {found.recovery.steps:,} "
            f"steps of {found.recovery.batch_size} × {found.recovery.seq_len} tokens"
        )
    begins = "" if found.resumes_at is None else f", resuming at step {found.resumes_at:,}"
    return [
        *lines,
        f"would write {found.out} ({written}), and meanwhile {found.state}{begins}",
        "this was a dry run: nothing was learned and nothing was written",
    ]


def preview_plain(found: Preview) -> dict[str, Any]:
    """Return all figures, ready for JSON; seconds and counts."""
    return {
        "ratio": {
            "requested": found.budget.ratio,
            "reachable": found.reachable,
            "of": found.budget.recorded.of,
        },
        **target_plain(found.budget, found.cache, found.met),
        "align": found.budget.align,
        "parameters": {"dense": found.parameters, "pruned": found.parameters_left},
        "tokens": {"learn": found.tokens, "measure": found.tokens_measured},
        "estimate": estimate_plain(found.estimate),
        "cpu_seconds": found.cpu_seconds,
        "recovery": None
        if found.recovery is None
        else {name: getattr(found.recovery, name) for name in ("train", "steps", "batch_size", "seq_len")},
        "out": str(found.out),
        "state": str(found.state),
        "resumes_at": found.resumes_at,
        "refused": [{"name": one.name, "reason": one.reason} for one in found.program.left_dense],
        "dry_run": True,
    }
