"""The verbs that measure: eval for quality, bench for speed."""

from typing import TYPE_CHECKING

from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import DataError
from dispfx.settings.trees import BenchSettings, CostsSettings, CurveSettings, EvalSettings
from dispfx.words.model_origin import origin_of
from dispfx.words.preconditions import check_files, check_folder, check_new_files, check_new_page
from dispfx.words.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.benchmark.speed_row import SpeedRow
    from dispfx.quality.task_harness import TaskScores
    from dispfx.report.evaluation import Evaluation


def evaluate(settings: EvalSettings, screen: Screen) -> None:
    """Measure a decoder, pruned or not: perplexity on a text, accuracy in tasks."""
    _check(settings)
    from dispfx import api
    from dispfx.report.evaluation import Evaluation, evaluation_plain, write_evaluation
    from dispfx.run.measured_decoder import measured_decoder

    model, asked = settings.model.model, settings.evaluation
    out = None if asked.out is None else asked.out.expanduser()
    decoder = None if out is None else measured_decoder(model, out)
    measured = alike = None
    scores: list[TaskScores] = []
    with screen.observer() as observer:
        if settings.text.eval_data:
            measured = api.evaluate(settings, observer=observer)
        if measured is not None and asked.dense is not None:
            # The same windows, so that both figures cover the same positions.
            same = {"context": measured.protocol["context"], "eval_windows": measured.protocol["windows"]}
            alike = api.agree(settings, **same)
        for one in (model, asked.dense) if asked.task_names else ():
            if one is not None:
                scores.append(api.score_tasks(settings.changed(model=one), observer=observer))
    own, other = (*scores, None, None)[:2]
    found = Evaluation(model, asked.dense, measured, alike, own, other, decoder)
    files = [] if out is None else write_evaluation(found, out)
    screen.print_json(evaluation_plain(found))
    _show(screen, found)
    for file in files:
        screen.print_text(str(file))


def curve(settings: CurveSettings, screen: Screen) -> None:
    """Measure the decoders of a family over its ratios, and find the smallest that is good enough."""
    asked = settings.curve
    check_files([asked.family], "family")
    origin_of(settings.model.model)
    check_texts(settings.text.eval_data or [])
    page = None if asked.out is None else asked.out.expanduser()
    if page is not None:
        check_new_page(page)
    from dispfx import api
    from dispfx.report.size_curve import CURVE_HEADER, curve_lines, curve_plain, curve_rows
    from dispfx.report.table import print_rows

    with screen.observer() as observer:
        found = api.curve(settings, observer=observer)
    files = [] if page is None else [page, page.with_suffix(".png")]
    screen.print_json({**curve_plain(found), "files": [str(file) for file in files]})
    if not screen.json:
        print_rows([curve_rows(found)], screen.console, CURVE_HEADER)
    for line in (*curve_lines(found), *map(str, files)):
        screen.print_text(line)


def _check(settings: EvalSettings) -> None:
    asked, model = settings.evaluation, settings.model.model
    if not settings.text.eval_data and not asked.task_names:
        raise DataError(
            "text or tasks to measure on are needed",
            hint="name a text file with --eval-data, or tasks of lm-eval with --tasks",
        )
    origin_of(model)
    if asked.dense is not None:
        check_folder(model)
        origin_of(asked.dense)
    check_texts(settings.text.eval_data or [])
    if asked.out is not None:
        check_new_files(asked.out.expanduser())
    if asked.task_folder is not None and not asked.task_folder.expanduser().is_dir():
        raise DataError("the --task-folder does not exist", where=str(asked.task_folder))


def _show(screen: Screen, found: "Evaluation") -> None:
    from dispfx.report.evaluation import task_table, text_lines
    from dispfx.report.table import print_rows
    from dispfx.report.task_rows import task_notes

    for line in text_lines(found):
        screen.print_text(line)
    if found.tasks is None or screen.json:
        return
    header, rows = task_table(found)
    print_rows([rows], screen.console, header)
    for line in task_notes(found.tasks):
        screen.print_text(line)


def costs(settings: CostsSettings, screen: Screen) -> None:
    """Measure a latency table: how long products and whole steps of a decoder take on a device."""
    origin_of(settings.model.model)
    path = refuse_existing(settings.measuring.path)
    from dispfx import api
    from dispfx.settings.tree import plain_section

    with screen.observer() as observer:
        table = api.costs(settings, observer=observer)
    screen.print_json(plain_section(table))
    for one in table.steps:
        screen.print_text(
            f"{one.text}, {one.mode}: dense {one.dense_seconds * 1e3:.3f} ms; pruned "
            + ", ".join(
                f"{parameters / one.dense_parameters:.0%} of the parameters {seconds * 1e3:.3f} ms"
                for parameters, seconds in zip(one.parameters, one.seconds, strict=True)
            )
        )
    screen.print_text(f"{path}: for `--costs`, on {table.device}")


def bench(settings: BenchSettings, screen: Screen) -> None:
    """Time prefill and decode steps, pruned and dense, with the largest possible speed-up."""
    out = None if settings.timing.out is None else settings.timing.out.expanduser()
    check_folder(settings.model.model)
    if out is not None:
        check_new_files(out)
    check_texts(settings.text.eval_data or [])
    if settings.timing.dense is not None:
        origin_of(settings.timing.dense)
    from dispfx import api
    from dispfx.report.speed import speed_line, speed_markdown, speed_plain, write_speed
    from dispfx.run.measured_decoder import measured_decoder

    decoder = None if out is None else measured_decoder(settings.model.model, out)
    rows: list[SpeedRow] = []

    def show(row: "SpeedRow") -> None:
        rows.append(row)
        screen.console.print(speed_line(row), markup=False, highlight=False, soft_wrap=True)
        if out is not None:
            write_speed(out, rows, {}, decoder=decoder)

    with screen.observer():
        benched = api.bench(settings, on_row=show)
    if out is not None:
        write_speed(out, benched.rows, benched.facts, decoder=decoder)
    screen.print_json(speed_plain(benched.rows, benched.facts))
    screen.print_text(speed_markdown(benched.rows, benched.facts))
