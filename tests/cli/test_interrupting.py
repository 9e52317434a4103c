"""Ctrl-C on a real run: exit code 130, a state, and a command that goes on to the end."""

import shlex
import signal
from pathlib import Path

import pytest

from dispfx.report import load_report
from tests.processes import started, wait_until
from tests.trust.runs import command, write_tokens

_PATIENCE_SECONDS = 120


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupted_run_names_the_command_that_goes_on_and_that_command_ends(tmp_path: Path):
    out = tmp_path / "an out"
    words = command(write_tokens(tmp_path / "tokens.safetensors"), out, "--export", "none")
    words[words.index("--steps") + 1] = "400"
    words.remove("--quiet")
    state = tmp_path / "an out.state"
    with started(["dispfx", *words]) as run:
        wait_until(
            lambda: bool(list(state.glob("*.safetensors"))),
            run,
            seconds=_PATIENCE_SECONDS,
            what="a state",
        )
        run.send_signal(signal.SIGINT)
        shown, said = run.communicate(timeout=_PATIENCE_SECONDS)

    assert run.returncode == 130, said
    assert "Traceback" not in said and not out.exists()
    first, second = said.strip().splitlines()
    assert first == f"interrupted; the state is in {out}.state; to go on:"
    program, *again = shlex.split(second)
    assert (program, again) == ("dispfx", [*words, "--resume"])
    assert "\r" not in shown and "\x1b" not in shown, "a pipe gets plain lines"

    with started(["dispfx", *again]) as resumed:
        shown, said = resumed.communicate(timeout=_PATIENCE_SECONDS)
    assert resumed.returncode == 0, said
    assert "going on at step" in shown
    assert load_report(out / "report.json").verify and not state.exists()
