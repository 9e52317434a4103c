"""A run that is killed, or whose disk is full, loses nothing: it goes on and ends as if nothing had been.

The programs run by themselves, since a process with threads cannot be forked safely.  On record are 50 kills;
here is one for each moment, or as many as DISPFX_KILLS says.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run
from tests.trust.moments import PHASES

KILLS = int(os.environ.get("DISPFX_KILLS", str(len(PHASES))))


def program(name: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"tests.trust.{name}", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_plan():
    record = program("killed_runs", "--kills", str(KILLS))
    assert not record["faults"]
    assert record["runs"] == KILLS and record["kills"] == record["asked"] >= KILLS
    assert len(record["killed_in"]) == min(KILLS, len(PHASES)), "every phase has its turn"


def test_a_full_disk_stops_a_run_with_a_message_and_it_goes_on(tmp_path: Path):
    """A limit on files, and small file systems where one can be mounted."""
    sizes = ["--sizes", "0", "1000", "20000"]
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode == 0:
        subprocess.run(["umount", tmp_path], check=True)
        sizes += ["--file-systems", "20000", "300000"]
    record = program("full_disk", *sizes)
    assert record["stopped"] == record["runs"] == (3 if mounted.returncode else 5)
    assert not record["faults"]


@pytest.mark.parametrize("out", ["/proc/dispfx", "/dev/null/out"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(out):
    words = ["compile", "demo", "--ratio", "0.3", "--steps", "1", "--out", out]
    result = run(*words)
    assert result.exit_code == 2 and "Traceback" not in result.output
