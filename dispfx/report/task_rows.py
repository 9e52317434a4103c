"""Task scores, pruned and dense: rows and notes for a terminal, a page and Markdown."""

from collections.abc import Sequence
from typing import Any

from dispfx.quality.task_harness import PAPER_METRICS, TaskScore, TaskScores
from dispfx.report.json_form import to_plain

HEADER = ("task", "metric", "shots", "questions", "score")
COMPARED_HEADER = (*HEADER[:-1], "dense", "pruned", "change")
_AVERAGE = ("the paper's five", "mean", "", "")


def task_line(score: TaskScore) -> str:
    """Return a score as one line of a log."""
    name, metric, shots, questions, value = _cells(score)
    return f"{name}: {metric} {value}, {questions} questions, {shots} shots"


def task_rows(found: TaskScores, dense: TaskScores | None = None) -> list[Sequence[str]]:
    """Return one row per task, and the average if all five tasks of the paper are there.

    Args:
        dense: of the dense decoder, in the same tasks.
    """
    average = found.average
    if dense is None:
        rows: list[Sequence[str]] = [_cells(score) for score in found.scores]
        return rows if average is None else [*rows, (*_AVERAGE, f"{average:.4f}")]
    before = {score.task: score for score in dense.scores}
    rows = [
        (*_cells(before[score.task]), *_change(before[score.task].value, score)) for score in found.scores
    ]
    if average is None or dense.average is None:
        return rows
    return [*rows, (*_AVERAGE, f"{dense.average:.4f}", f"{average:.4f}", f"{average - dense.average:+.4f}")]


def task_notes(found: TaskScores) -> list[str]:
    """Return the notes needed to repeat and judge the scores."""
    harness = found.versions.get("lm-eval", "unknown")
    notes = [f"lm-eval {harness}; at most {found.context} tokens per question, batch size {found.batch_size}"]
    cut = [score.task for score in found.scores if score.samples < score.of]
    if cut:
        notes.append(
            f"the limit of questions cuts {', '.join(cut)} short: such scores cannot be compared with others"
        )
    missing = [task for task in PAPER_METRICS if task not in {score.task for score in found.scores}]
    if 0 < len(missing) < len(PAPER_METRICS):
        notes.append(f"no average of the paper's five tasks without {', '.join(missing)}")
    return notes


def tasks_plain(found: TaskScores) -> dict[str, Any]:
    """Return all figures, ready for JSON."""
    return {**to_plain(found), "average": found.average}


def _cells(score: TaskScore) -> tuple[str, str, str, str, str]:
    asked = f"{score.samples:,}" if score.samples == score.of else f"{score.samples:,} of {score.of:,}"
    error = "" if score.error is None else f" ± {score.error:.4f}"
    return score.task, score.metric, str(score.shots), asked, f"{score.value:.4f}{error}"


def _change(before: float, after: TaskScore) -> tuple[str, str]:
    error = "" if after.error is None else f" ± {after.error:.4f}"
    return f"{after.value:.4f}{error}", f"{after.value - before:+.4f}"
