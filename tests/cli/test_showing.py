"""report."""

import json
from pathlib import Path

from tests.report.runs import write_run


def test_report_writes_the_page_and_names_the_files(dispfx, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    result = dispfx("report", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == str(folder / "report.html")
    files = json.loads(dispfx("report", folder, "--json").stdout)["files"]
    assert all(Path(file).is_file() for file in files) and len(files) == 9
    assert dispfx("report", folder, "--quiet").output == ""


def test_report_refuses_what_dispfx_did_not_write(dispfx, tmp_path: Path):
    result = dispfx("report", tmp_path)
    assert result.exit_code == 2 and "did not write it" in result.stderr
    assert list(tmp_path.iterdir()) == []
