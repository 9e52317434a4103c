"""Verbs that show results or the installation: report, compare, passes, doctor."""

from collections.abc import Sequence
from pathlib import Path

from dispfx.cli.screen import Screen
from dispfx.errors import DispfxError, OutputError
from dispfx.settings.trees import CompareSettings, NoSettings, VerifySettings
from dispfx.words.preconditions import check_folder, check_new_page


def report(settings: VerifySettings, screen: Screen) -> None:
    """Draw DIR/report.html and DIR/pictures/ from the folder's data, as every compile does at its end."""
    folder = settings.folder.folder
    check_folder(folder, report=True)
    from dispfx.report.page import write_page
    from dispfx.report.run import read_run
    from dispfx.run.folders import require_unchanged

    require_unchanged(folder.expanduser())
    notes = read_run(folder).left_out
    files = [str(path) for path in write_page(folder)]
    screen.print_json({"files": files, "notes": notes})
    screen.print_text("\n".join((*notes, *files)))


def compare(settings: CompareSettings, screen: Screen) -> None:
    """Show runs side by side, or what two plans have in common."""
    paths, out = settings.paths.paths, settings.paths.out
    if all(path.expanduser().is_file() for path in paths):
        _compare_plans(paths, out, screen)
        return
    for path in paths:
        check_folder(path, report=True)
    if out is not None:
        check_new_page(out.expanduser())
    _compare_runs(paths, out, screen)


def _compare_runs(paths: Sequence[Path], out: Path | None, screen: Screen) -> None:
    from dispfx.report.run import read_run
    from dispfx.report.run_comparison import RUN_HEADER, run_notes, run_rows, runs_plain, write_comparison
    from dispfx.report.table import print_rows
    from dispfx.run.folders import require_unchanged

    for path in paths:
        require_unchanged(path.expanduser())
    runs = [read_run(path) for path in paths]
    files = [] if out is None else write_comparison(runs, out.expanduser())
    screen.print_json({"runs": runs_plain(runs), "notes": run_notes(runs), "files": [str(f) for f in files]})
    if not screen.json:
        print_rows([run_rows(runs)], screen.console, RUN_HEADER)
    for line in (*run_notes(runs), *map(str, files)):
        screen.print_text(line)


def _compare_plans(paths: Sequence[Path], out: Path | None, screen: Screen) -> None:
    if len(paths) != 2 or out is not None:
        raise OutputError("plans are compared in pairs, without --out", hint="name two plans")
    from dispfx.plan.plan import Plan
    from dispfx.report.plans import difference_lines, difference_plain, difference_rows, plan_difference
    from dispfx.report.table import print_rows

    difference = plan_difference(Plan.load(paths[0]), Plan.load(paths[1]))
    screen.print_json(difference_plain(difference))
    for line in difference_lines(difference):
        screen.print_text(line)
    if not screen.json:
        header = ("kept by", "first", "second", "both", "overlap", "by chance")
        print_rows([difference_rows(difference)], screen.console, header)


def passes(settings: NoSettings, screen: Screen) -> None:
    """List the passes of the compiler, in order, with their stage and effect."""
    from dispfx.compiler.pipelines import described_passes
    from dispfx.report.table import print_rows

    rows = described_passes()
    screen.print_json({"passes": [dict(zip(("name", "stage", "effect"), row, strict=True)) for row in rows]})
    if not screen.json:
        print_rows([rows], screen.console, ("pass", "stage", "effect"))


def doctor(settings: NoSettings, screen: Screen) -> None:
    """Show versions, devices, and what is missing; exit code 2 if something required is missing."""
    from dispfx import api
    from dispfx.report import to_plain
    from dispfx.report.table import print_rows

    findings = api.doctor()
    document = {"findings": to_plain(findings)}
    if not screen.json:
        rows = [(finding.name, finding.state, finding.detail) for finding in findings]
        print_rows([rows], screen.console, ("", "state", ""))
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        error = DispfxError(f"something that dispfx needs is missing: {', '.join(missing)}")
        error.document = document
        raise error
    screen.print_json(document)
