"""The same commit gives the same wheel and sdist, byte for byte."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "build.py"


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path):
    for name in ("first", "second"):
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert [name.split(".")[-1] for name in names] == ["whl", "gz"] and "dispfx" in names[0]
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
