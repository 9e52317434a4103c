"""A step of learning masks and of recovery is measured on random weights of a known shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_recovery_step.py"


@pytest.mark.slow
def test_every_kind_of_step_has_a_row(tmp_path: Path):
    words = ["--shape", "tiny", "--layers", "1", "--batch-size", "1", "--seq-len", "16", "--steps", "5"]
    command = [sys.executable, str(TOOL), "--out", str(tmp_path), "--device", "cpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "recovery_step.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["learn", "scales", "weights"]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert len((tmp_path / "recovery_step.md").read_text().splitlines()) == 7
