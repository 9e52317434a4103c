"""What a run would do, for people and for programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispfx.estimate.run_estimate import Estimate
from dispfx.ir.program import Program
from dispfx.plan.budget import BudgetOf
from dispfx.report.estimate import duration, estimate_lines, estimate_plain
from dispfx.settings.learning_settings import LearnSettings


@dataclass(frozen=True, eq=False)
class Preview:
    """What a run with these arguments would do.

    Args:
        program: the decoder, analysed.
        settings: of learning.
        estimate: of its memory and time.
        ratio: that was asked for.
        ratio_of: what is counted.
        align: what widths would be multiples of.
        reachable: ratio of the widths that meet the budget when no feature matters more than another;
            a learned plan meets it as closely.
        parameters: of the decoder.
        parameters_left: of the same, at those widths.
        tokens: to learn from.
        tokens_measured: to measure perplexity on.
        cpu_seconds: that the steps would take on this CPU; None where the run is for another device.
        out: what would be written.
        state: where the state would be kept meanwhile.
        resumes_at: step that the run would go on at, or None where it starts anew.
    """

    program: Program
    settings: LearnSettings
    estimate: Estimate
    ratio: float
    ratio_of: BudgetOf
    align: int
    reachable: float
    parameters: int
    parameters_left: int
    tokens: int
    tokens_measured: int
    cpu_seconds: float | None
    out: Path
    state: Path
    resumes_at: int | None


def preview_lines(found: Preview, written: str) -> list[str]:
    """Return what would be learned, from what, in what time and memory, and what would be written.

    Args:
        written: what `out` would be, in words.
    """
    settings = found.settings
    seen = settings.steps * settings.batch_size * settings.seq_len
    missed = found.parameters_left / found.parameters - 1.0
    lines = [
        f"ratio: {found.ratio:.2%} of {found.ratio_of} asked, {found.reachable:.2%} can be met with widths "
        f"of multiples of {found.align}",
        f"parameters: {found.parameters:,} → about {found.parameters_left:,} ({missed:+.1%})",
        f"text: {found.tokens:,} tokens to learn from, {found.tokens_measured:,} to measure on",
        f"learning: {settings.steps:,} steps of {settings.batch_size} × {settings.seq_len} tokens read "
        f"{seen / max(found.tokens, 1):.1f} times as many",
        *estimate_lines(found.estimate),
    ]
    if found.cpu_seconds is not None:
        lines.append(f"  this CPU: about {duration(found.cpu_seconds)} for {settings.steps:,} steps")
    begins = "" if found.resumes_at is None else f", going on at step {found.resumes_at:,}"
    return [
        *lines,
        f"would write {found.out} ({written}), and meanwhile {found.state}{begins}",
        "this was a dry run: nothing was learned and nothing was written",
    ]


def preview_plain(found: Preview) -> dict[str, Any]:
    """Return all figures, ready for JSON; seconds and counts."""
    return {
        "ratio": {"requested": found.ratio, "reachable": found.reachable, "of": found.ratio_of},
        "align": found.align,
        "parameters": {"dense": found.parameters, "pruned": found.parameters_left},
        "tokens": {"learn": found.tokens, "measure": found.tokens_measured},
        "estimate": estimate_plain(found.estimate),
        "cpu_seconds": found.cpu_seconds,
        "out": str(found.out),
        "state": str(found.state),
        "resumes_at": found.resumes_at,
        "refused": [{"name": one.name, "reason": one.reason} for one in found.program.left_dense],
        "dry_run": True,
    }
