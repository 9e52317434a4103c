"""Whatever goes wrong ends in a message and the right exit code."""

import errno
import io
import json
import os
from pathlib import Path

import pytest

from dispfx import errors
from dispfx.cli.screen import Screen
from tests.processes import started


def compile_demo(dispfx, out: Path, *more: str):
    return dispfx("compile", "demo", "--ratio", "0.3", "--out", out, *more)


@pytest.mark.parametrize("kind", errors.DispfxError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_raised_on_purpose_is_a_message_with_its_exit_code(
    dispfx, replaced, tmp_path: Path, kind
):
    replaced("compile", error=kind("what was wrong", where="layers.0", hint="do this"))
    result = compile_demo(dispfx, tmp_path / "out")

    ours = kind in (errors.PassError, errors.VerificationError)
    assert result.exit_code == (1 if ours else 2)
    assert result.stderr == "error: what was wrong\n  where: layers.0\n  try:   do this\n"
    assert result.stdout == ""


def test_an_unexpected_error_is_our_fault_in_two_lines(dispfx, replaced, tmp_path: Path):
    replaced("compile", error=RuntimeError("shape mismatch\nwith a long tail"))
    result = compile_demo(dispfx, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == "error: RuntimeError: shape mismatch\n  run again with --debug to see where\n"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(dispfx, replaced, tmp_path: Path):
    replaced("compile", error=errors.DataError("no text"))
    result = compile_demo(dispfx, tmp_path / "out", "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "no text" in result.stderr


def test_an_interrupt_says_how_to_go_on(dispfx, replaced, tmp_path: Path):
    replaced("compile", error=KeyboardInterrupt())
    fresh = compile_demo(dispfx, tmp_path / "out")
    assert fresh.exit_code == 130 and "run the same command again" in fresh.stderr

    (tmp_path / "out.state").mkdir()
    saved = compile_demo(dispfx, tmp_path / "out")
    assert saved.exit_code == 130
    assert "--resume" in saved.stderr and str(tmp_path / "out.state") in saved.stderr


def test_an_interrupt_of_a_verb_without_state_promises_none(dispfx, replaced):
    replaced("inspect", error=KeyboardInterrupt())
    result = dispfx("inspect", "demo")
    assert result.exit_code == 130 and "nothing was written" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "demo"),
        ("compile", "mine:build", "--ratio", "0.3", "--data", "text.txt", "--out", "out"),
        ("compile", "--from-report", "report.json", "--out", "out"),
        ("doctor",),
    ],
)
def test_a_current_folder_that_was_removed_is_said_before_a_library_looks_at_it(
    dispfx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    """Left to torch, the process ends without a word of ours."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = dispfx(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: the current folder does not exist any more")


def test_a_full_disk_under_what_is_printed_is_no_fault_of_ours(dispfx, replaced, tmp_path: Path):
    replaced("compile", error=OSError(errno.ENOSPC, "No space left on device"))
    result = compile_demo(dispfx, tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: what this command prints cannot be written: No space left on device"
    )


def test_signs_that_an_encoding_lacks_end_no_command():
    """Names of sites have an ellipsis."""
    with started(["dispfx", "inspect", "demo"], {**os.environ, "PYTHONIOENCODING": "ascii"}) as process:
        printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "layers.{0?3}" in printed


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"u00e9"), ("utf-8", "é".encode())])
def test_json_stays_whole_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, printed: bytes):
    into = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(into, encoding, write_through=True))
    Screen(True, False).print_json({"text": "é"})
    assert json.loads(into.getvalue()) == {"text": "é"} and printed in into.getvalue()
