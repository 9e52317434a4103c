"""What a user sees while a compilation runs."""

import io
import math
import re

import pytest
from rich.console import Console

from dispfx.cli.screen import spelled
from dispfx.learning.records import StepRecord
from dispfx.report import NullObserver, Observer, Report, TerminalObserver
from dispfx.verification.equivalence import Verification
from tests.report.test_sites import program


def observed(terminal: bool, quiet: bool = False) -> tuple[TerminalObserver, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, color_system=None)
    return TerminalObserver(console, quiet), stream


def record(step: int, steps: int, **changed: float) -> StepRecord:
    values = {"loss": 3.25, "budget_loss": 0.1, "achieved_ratio": 0.21, "tokens_per_second": 12_345.0}
    return StepRecord(step, steps, **{**values, "seconds_left": float(steps - step), **changed})  # type: ignore[arg-type]


def everything(observer: Observer, report: Report) -> None:
    observer.stage("capture")
    observer.stage("capture", 1.25)
    observer.found(program(refused=1))
    observer.note("no state yet: starting at step 0")
    observer.stage("learn")
    for step in range(1, 401):
        observer.learning(record(step, 400))
    observer.stage("learn", 61.0)
    for verification in report.verify:
        observer.verified(verification)
    observer.finished(report)


def test_a_pipe_gets_few_plain_lines(report: Report):
    observer, stream = observed(terminal=False)
    with observer:
        everything(observer, report)
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[0].split() == ["capture", "1.2", "s"]
    assert sum(line.startswith("step ") for line in lines) == 10
    assert "step 40/400  loss 3.250  removed 21.0%  12,345 tokens/s  360 s left" in lines
    assert any(line.startswith("parameters") for line in lines)


def test_a_run_of_few_steps_writes_each_of_them_once():
    observer, stream = observed(terminal=False)
    for step in range(1, 4):
        observer.learning(record(step, 3))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/3", "2/3", "3/3"]


def test_a_terminal_gets_a_bar_with_every_figure(report: Report):
    observer, stream = observed(terminal=True)
    with observer:
        everything(observer, report)
    text = stream.getvalue()
    for expected in ("learning", "loss 3.250", "removed 21.0%", "12,345 tokens/s", "6 branches", "701,204"):
        assert expected in text, expected


def test_an_error_in_the_middle_gives_the_cursor_back():
    for begin in ("stage", "learning"):
        observer, stream = observed(terminal=True)
        try:
            with observer:
                if begin == "stage":
                    observer.stage("capture")
                else:
                    observer.learning(record(1, 10))
                raise ValueError
        except ValueError:
            pass
        text = stream.getvalue()
        assert text.count("\x1b[?25h") >= 1, "the cursor stays hidden"
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_quiet_shows_only_the_graphs_that_were_asked_for(report: Report):
    for terminal in (True, False):
        observer, stream = observed(terminal, quiet=True)
        with observer:
            everything(observer, report)
            observer.verified(Verification("a = b", (1, 17), 1.0, 1.0, 0.0))
        assert stream.getvalue() == ""
        observer.printed("canonicalize", "%x = add(%a, %b[0])")
        assert "%x = add(%a, %b[0])" in stream.getvalue()


def test_names_with_brackets_are_shown_as_they_are():
    observer, stream = observed(terminal=True)
    observer.note("left dense: experts[0] [bold]")
    assert "experts[0] [bold]" in stream.getvalue()


def test_a_failed_comparison_is_shown_and_one_that_holds_is_not(report: Report):
    observer, stream = observed(terminal=False)
    observer.verified(report.verify[0])
    assert stream.getvalue() == ""
    observer.verified(Verification("onnx = lowered", (1, 17), 1.0, 0.5, 1e-4))
    assert "onnx = lowered" in stream.getvalue() and "5.00e-01" in stream.getvalue()


def test_bad_steps_are_shown():
    observer, stream = observed(terminal=False)
    observer.learning(record(1, 1, loss=math.nan, bad_steps=2))
    assert "2 bad steps" in stream.getvalue()


def test_the_null_observer_takes_every_event(report: Report):
    observer: Observer = NullObserver()
    everything(observer, report)
    observer.printed("canonicalize", "graph")


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_bar_takes_one_line_of_any_terminal(width: int):
    stream = io.StringIO()
    observer = TerminalObserver(Console(file=stream, force_terminal=True, width=width, color_system=None))
    with observer:
        for step in (1, 9_999):
            observer.learning(record(step, 10_000, tokens_per_second=1_234_567.0, bad_steps=3))
    shown = ESCAPES.sub("", stream.getvalue())
    assert "\n" not in shown.replace("\r", "").strip("\n"), "a bar of several lines scrolls a terminal away"
    lines = [line for line in re.split(r"[\r\n]", shown) if line.strip()]
    assert lines and max(map(len, lines)) <= width
    assert any("9999/10000" in line for line in lines) or width < 40


def test_a_log_gets_a_line_at_least_every_minute(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 10_000, 7))
    monkeypatch.setattr("dispfx.report.observer.time.monotonic", lambda: float(next(clock)))
    observer, stream = observed(terminal=False)
    for step in range(1, 101):
        observer.learning(record(step, 10_000))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11, "100 steps of 7 seconds, none of which ends a tenth"
    assert "\r" not in stream.getvalue()


def test_other_long_work_is_shown_in_the_same_way():
    observer, stream = observed(terminal=False)
    for step in range(1, 41):
        observer.working("tuning", step, 40, "loss 2.000")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[0] == "step 4/40  loss 2.000"
    terminal, shown = observed(terminal=True)
    with terminal:
        terminal.working("tuning", 1, 40, "loss 2.000")
    assert "tuning 1/40" in shown.getvalue()


def test_tables_keep_every_figure_on_a_narrow_terminal(report: Report):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system=None)
    TerminalObserver(console).finished(report)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    text = stream.getvalue()
    for figure in ("before: 922,112", "after: 701,204", "before: 3.200", "batch × tokens: 2 × 9"):
        assert figure in text, figure
    assert "before: 2 × 9" not in text


def test_a_note_names_settings_as_its_reader_spells_them():
    stream = io.StringIO()
    TerminalObserver(Console(file=stream, width=120), spell=spelled).note("a smaller `align` comes closer")
    assert stream.getvalue() == "a smaller --align comes closer\n"
