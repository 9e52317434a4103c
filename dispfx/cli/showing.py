"""Verbs that show what was done: report."""

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.screen import Screen
from dispfx.preconditions import check_folder


@reports_faults
def report(
    folder: given.Folder,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Draw DIR/report.html and DIR/pictures/ from what the folder holds; every compile does so at its end."""
    check_folder(folder)
    from dispfx.report.page import write_page

    screen = Screen(json, quiet)
    files = [str(path) for path in write_page(folder)]
    screen.print_json({"files": files})
    screen.print_text("\n".join(files))
