"""The table of tasks: lm-eval asks the dense and each pruned decoder.

The demo was trained on its own grammar and cannot solve the paper's tasks, so task files test the skills of
its
grammar: an answer is correct if it is the likeliest continuation, token by token.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dispfx.api.tasks import score_tasks
from dispfx.demo.grammar import SKILLS, draw_lines
from dispfx.errors import DataError
from dispfx.quality.task_harness import PAPER_METRICS
from dispfx.report.task_rows import task_notes
from reproduction.cells import Content, Options, why_not
from reproduction.paper import SECOND_HAND, ZERO_SHOT, family
from reproduction.runs import Bench
from reproduction.setup import Setup

_FILE = "tasks.json"
# Seeds of the texts that the demo learned from are 2**32 and above.
_SEED, _QUESTIONS = 11, 200
_TASK = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""


def tasks(name: str, bench: Bench, options: Options) -> Content:
    """Ask lm-eval's tasks, dense and pruned, each measured by its own metric."""
    own = bench.source.origin == "demo" and not (options.tasks or options.task_folder)
    asked = options.tasks or (SKILLS if own else tuple(PAPER_METRICS))
    ratios = (0.0, *options.ratios)
    setups = [Setup.of(ratio) if ratio else None for ratio in ratios]
    found = [_asked(bench, setup, options, asked, own) for setup in setups]
    # What was asked is kept with the answers: a page that is made again need not be told.
    kept = next(((one["tasks"], one["own"]) for one in found if one), (asked, own))
    if (options.tasks or options.task_folder) and list(kept[0]) != list(asked):
        raise DataError(
            f"the folder has answers to {', '.join(kept[0])}, and {', '.join(asked)} were asked",
            where=str(bench.out),
            hint="name another folder with --out",
        )
    asked, own = kept
    figures = ZERO_SHOT.get(family(bench.source.name) or "", {})
    rows = []
    for ratio, setup, one in zip(ratios, setups, found, strict=True):
        cells = one["cells"] if one else [why_not(bench, setup, _FILE), *[""] * len(asked)]
        of_paper = f"{figures[ratio]:.2f}" if ratio in figures else "—"
        label = f"{ratio:.0%} removed" if ratio else "dense"
        rows.append([label, *cells[: len(asked)]] if own else [label, *cells, of_paper])
    header = ["", *asked, *([] if own else ["mean of the paper's five", "paper"])]
    told = [note for one in found[:1] if one for note in one["notes"]]
    return Content(header, rows, [*told, *_notes(own, bool(figures))])


def write_skill_tasks(folder: Path) -> Path:
    """Write a task of lm-eval and its questions for each skill of the demo, and return their folder."""
    for skill in SKILLS:
        data = folder / f"{skill}.jsonl"
        lines = draw_lines(skill, _SEED, _QUESTIONS)
        rows = (json.dumps({"prompt": line.prompt, "answer": line.answer}) for line in lines)
        data.write_text("\n".join(rows), encoding="utf-8")
        (folder / f"{skill}.yaml").write_text(
            _TASK.format(task=skill, data=json.dumps(str(data))), encoding="utf-8"
        )
    return folder


def _asked(
    bench: Bench, setup: Setup | None, options: Options, asked: Sequence[str], own: bool
) -> dict[str, Any] | None:
    """Return a row's cells and notes; none for a pruned one where the dense one could not be asked."""
    if setup is not None and (bench.run(setup) is None or f"dense: {_FILE}" in bench.failures):
        return None
    return bench.kept(setup, _FILE, lambda: _scores(bench, setup, options, asked, own))


def _scores(
    bench: Bench, setup: Setup | None, options: Options, asked: Sequence[str], own: bool
) -> dict[str, Any]:
    """Return what was asked, the cells of one row, in percent, and what a reader must know."""
    with ExitStack() as stack:
        decoder = bench.common.model if setup is None else str(stack.enter_context(bench.as_folder(setup)))
        folder = options.task_folder
        if own:
            folder = write_skill_tasks(Path(stack.enter_context(TemporaryDirectory(prefix="reproduce-"))))
        found = score_tasks(
            decoder,
            tasks=asked,
            task_folder=folder,
            limit=options.task_limit,
            device=bench.common.device,
            dtype=bench.common.dtype if setup is None else None,
        )
    scores = {score.task: score for score in found.scores}
    cells = [f"{100 * scores[task].value:.2f}" for task in asked]
    metrics = ", ".join(f"{task} by {scores[task].metric}" for task in asked)
    counted = ", ".join(sorted({f"{score.samples:,}" for score in found.scores}))
    harness, *others = task_notes(found)
    notes = [
        f"In percent: {metrics}; {counted} questions each, asked by {harness}.",
        *(f"{note[0].upper()}{note[1:]}." for note in others),
    ]
    average = "—" if found.average is None else f"{100 * found.average:.2f}"
    return {"tasks": list(asked), "own": own, "cells": [*cells, average], "notes": notes}


def _notes(own: bool, quoted: bool) -> list[str]:
    if own:
        return [
            "These are task files of our own, made from the demo's grammar (copying, recall, small sums, "
            "counting, agreement); a question is right where the decoder's likeliest continuation is the "
            f"whole answer. Not run: {', '.join(PAPER_METRICS)}. Their data are on the hub, and the demo, "
            "which was trained on that grammar alone, could only guess."
        ]
    return [SECOND_HAND] if quoted else []
