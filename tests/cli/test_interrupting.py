"""Ctrl-C on a real run: exit code 130, a state, and a command that goes on to the end."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispfx.report import load_report
from tests.trust.runs import command, write_tokens

_PATIENCE_SECONDS = 120


def as_at_a_terminal() -> None:
    """A shell lets what it runs in the background ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dispfx", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=as_at_a_terminal,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupted_run_names_the_command_that_goes_on_and_that_command_ends(tmp_path: Path):
    out = tmp_path / "an out"
    words = command(write_tokens(tmp_path / "tokens.safetensors"), out, "--export", "none")
    words[words.index("--steps") + 1] = "400"
    words.remove("--quiet")
    run = start(words)
    until = time.monotonic() + _PATIENCE_SECONDS
    while not list((tmp_path / "an out.state").glob("*.safetensors")):
        assert run.poll() is None and time.monotonic() < until, run.communicate()
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    shown, said = run.communicate(timeout=_PATIENCE_SECONDS)

    assert run.returncode == 130, said
    assert "Traceback" not in said and not out.exists()
    first, second = said.strip().splitlines()
    assert first == f"interrupted; the state is in {out}.state; to go on:"
    program, *again = shlex.split(second)
    assert (program, again) == ("dispfx", [*words, "--resume"])
    assert "\r" not in shown and "\x1b" not in shown, "a pipe gets plain lines"

    resumed = start(again)
    shown, said = resumed.communicate(timeout=_PATIENCE_SECONDS)
    assert resumed.returncode == 0, said
    assert "going on at step" in shown
    assert load_report(out / "report.json").verify and not (tmp_path / "an out.state").exists()
