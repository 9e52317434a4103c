"""Verbs that show what was done: report, compare, doctor."""

from pathlib import Path
from typing import Annotated

import typer

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.screen import Screen
from dispfx.errors import DispfxError, OutputError
from dispfx.preconditions import check_folder


@reports_faults
def report(
    folder: given.Folder,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Draw DIR/report.html and DIR/pictures/ from what the folder holds; every compile does so at its end."""
    check_folder(folder, report=True)
    from dispfx.report.page import write_page

    screen = Screen(json, quiet)
    files = [str(path) for path in write_page(folder)]
    screen.print_json({"files": files})
    screen.print_text("\n".join(files))


@reports_faults
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR... | PLAN PLAN", help="Folders that dispfx wrote, or two plans.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Of folders: write a page (.html) with the plot, and the plot as PNG.")
    ] = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Put runs side by side, or show what two plans keep alike."""
    screen = Screen(json, quiet)
    if all(path.expanduser().is_file() for path in paths):
        _compare_plans(paths, out, screen)
        return
    for path in paths:
        check_folder(path, report=True)
    if out is not None and (out.suffix != ".html" or not out.expanduser().parent.is_dir()):
        raise OutputError("--out is an .html file in a folder that exists", where=str(out))
    _compare_runs(paths, out, screen)


def _compare_runs(paths: list[Path], out: Path | None, screen: Screen) -> None:
    from dispfx.report.comparison import RUN_HEADER, run_notes, run_rows, runs_plain, write_comparison
    from dispfx.report.run import read_run
    from dispfx.report.table import print_rows

    runs = [read_run(path) for path in paths]
    files = [] if out is None else write_comparison(runs, out.expanduser())
    screen.print_json({"runs": runs_plain(runs), "notes": run_notes(runs), "files": [str(f) for f in files]})
    if not screen.json:
        print_rows([run_rows(runs)], screen.console, RUN_HEADER)
    for line in (*run_notes(runs), *map(str, files)):
        screen.print_text(line)


def _compare_plans(paths: list[Path], out: Path | None, screen: Screen) -> None:
    if len(paths) != 2 or out is not None:
        raise OutputError("two plans are compared at a time, and on the screen", hint="leave out the rest")
    from dispfx.ir.plan import Plan
    from dispfx.report.plans import difference_lines, difference_plain, difference_rows, plan_difference
    from dispfx.report.table import print_rows

    difference = plan_difference(Plan.load(paths[0]), Plan.load(paths[1]))
    screen.print_json(difference_plain(difference))
    for line in difference_lines(difference):
        screen.print_text(line)
    if not screen.json:
        header = ("kept by", "first", "second", "both", "overlap", "by chance")
        print_rows([difference_rows(difference)], screen.console, header)


@reports_faults
def doctor(json: given.Json = False, quiet: given.Quiet = False, debug: given.Debug = False) -> None:
    """Show versions, devices, and what is missing; exit code 2 where something needed is."""
    from dispfx import api
    from dispfx.report import to_plain
    from dispfx.report.table import print_rows

    screen = Screen(json, quiet)
    findings = api.doctor()
    document = {"findings": to_plain(findings)}
    if not json:
        rows = [(finding.name, finding.state, finding.detail) for finding in findings]
        print_rows([rows], screen.console, ("", "state", ""))
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        error = DispfxError(f"something that dispfx needs is missing: {', '.join(missing)}")
        error.document = document
        raise error
    screen.print_json(document)
