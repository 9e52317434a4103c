"""The verb that measures quality: eval."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.making import reading_options
from dispfx.cli.screen import Screen
from dispfx.errors import DataError
from dispfx.origin import origin_of
from dispfx.preconditions import check_folder
from dispfx.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.measure.tasks import TaskScores
    from dispfx.report.evaluation import Evaluation


@reports_faults
def evaluate(
    model: given.ModelOrFolder,
    eval_data: given.EvalData = None,
    data_field: given.DataField = None,
    data_bytes: given.DataBytes = None,
    bos: given.Bos = "auto",
    allow_unknown: given.AllowUnknown = False,
    eval_windows: given.EvalWindows = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens a window, and of a question at most.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…", help="Tasks of lm-eval, separated by commas (pip install 'dispfx[lm-eval]')."
        ),
    ] = None,
    task_folder: Annotated[
        Path | None,
        typer.Option(help="Folder with task files of your own. They are programs: use those you trust."),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Answered examples before each question (0, or the task's own).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Ask the first so many questions of each task only.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions a forward pass.")] = 1,
    tokenizer: given.Tokenizer = None,
    dense: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What DIR was compiled from: measured in the same tasks, and how alike both predict.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write eval.md and eval.json to; `report DIR` shows them.")
    ] = None,
    revision: given.Revision = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    trust_remote_code: given.TrustRemoteCode = False,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Measure a decoder, pruned or not: perplexity on a text, accuracy in tasks."""
    names = _names(tasks or [])
    if not eval_data and not names:
        raise DataError(
            "text or tasks to measure on are needed",
            hint="name a text file with --eval-data, or tasks of lm-eval with --tasks",
        )
    origin_of(model)
    if dense is not None:
        check_folder(Path(model))
        origin_of(dense)
    check_texts(eval_data or [])
    if task_folder is not None and not task_folder.expanduser().is_dir():
        raise DataError("--task-folder is a folder, and there is none", where=str(task_folder))
    from dispfx import api
    from dispfx.report.evaluation import Evaluation, evaluation_plain, write_evaluation

    screen = Screen(json, quiet)
    decoder: dict[str, Any] = dict(
        tokenizer=tokenizer,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        context=context,
        bos=bos,
    )
    text: dict[str, Any] = reading_options(data_field, data_bytes)
    text |= {"eval_data": eval_data, "allow_unknown": allow_unknown}
    measured = alike = None
    scores: list[TaskScores] = []
    with screen.observer() as observer:
        if eval_data:
            measured = api.evaluate(model, **decoder, **text, windows=eval_windows, observer=observer)
        if measured is not None and dense is not None:
            # The same windows, so that both figures are of the same positions.
            same = {name: measured.protocol[name] for name in ("context", "windows")}
            alike = api.agree(model, dense, **decoder | text | same)
        for each in (model, dense) if names else ():
            if each is not None:
                asked: dict[str, Any] = dict(
                    folder=task_folder, shots=shots, limit=limit, batch_size=batch_size
                )
                scores.append(api.score_tasks(each, names, **decoder, **asked, observer=observer))
    found = Evaluation(model, dense, measured, alike, *scores)
    files = [] if out is None else write_evaluation(found, out.expanduser())
    screen.print_json(evaluation_plain(found))
    _show(screen, found)
    for file in files:
        screen.print_text(str(file))


def _show(screen: Screen, found: "Evaluation") -> None:
    from dispfx.report.evaluation import task_table, text_lines
    from dispfx.report.table import print_rows
    from dispfx.report.tasks import task_notes

    for line in text_lines(found):
        screen.print_text(line)
    if found.tasks is None or screen.json:
        return
    header, rows = task_table(found)
    print_rows([rows], screen.console, header)
    for line in task_notes(found.tasks):
        screen.print_text(line)


def _names(words: Sequence[str]) -> list[str]:
    return [name.strip() for word in words for name in word.split(",") if name.strip()]
