"""Progress of a compilation for the user.

The compiler notifies an `Observer` and never prints.  `TerminalObserver` shows a spinner for each stage and a
progress bar while learning.  If the output is piped, it writes plain lines instead: one per finished stage,
and one per tenth of the steps or per minute, whichever comes first.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Column

from dispfx.ir.program import Program
from dispfx.learning.records import StepRecord
from dispfx.report.schema import Report
from dispfx.report.site_tables import found_lines, refusal_lines
from dispfx.report.table import flattered_notes, print_report
from dispfx.verification.equivalence import Verification

_PLAIN_LINES = 10
_LONGEST_SILENCE_SECONDS = 60.0
# Narrower terminals have no room for a bar next to the figures.
_WIDTH_OF_A_BAR = 90


class Observer(Protocol):
    """Receives the events of a compilation."""

    def stage(self, name: str, seconds: float | None = None) -> None:
        """A stage begins (`seconds` is None) or has ended after `seconds`."""
        ...

    def note(self, text: str) -> None:
        """A note for the user, in one line."""
        ...

    def found(self, program: Program) -> None:
        """The decoder is analysed."""
        ...

    def printed(self, name: str, graph: str) -> None:
        """The graph after the pass `name`, requested by the user."""
        ...

    def learning(self, record: StepRecord) -> None:
        """A step of learning is done."""
        ...

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        """A part of a long task is done."""
        ...

    def verified(self, verification: Verification) -> None:
        """Two forms of the pruned decoder were compared."""
        ...

    def finished(self, report: Report) -> None:
        """The output is complete."""
        ...


class NullObserver:
    """Shows nothing; a base for observers of a few events."""

    def stage(self, name: str, seconds: float | None = None) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def found(self, program: Program) -> None:
        """Ignore it."""

    def printed(self, name: str, graph: str) -> None:
        """Ignore it."""

    def learning(self, record: StepRecord) -> None:
        """Ignore it."""

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        """Ignore it."""

    def verified(self, verification: Verification) -> None:
        """Ignore it."""

    def finished(self, report: Report) -> None:
        """Ignore it."""


class TerminalObserver(NullObserver):
    """Shows a compilation on a console; a context manager that leaves the terminal clean.

    Args:
        console: the output; stderr if stdout carries JSON.
        quiet: show only graphs that the user requested.
        spell: rewrites the settings that a note names, as `align=8`, for those who read it.
    """

    def __init__(self, console: Console, quiet: bool = False, spell: Callable[[str], str] = str):
        self._console = console
        self._quiet = quiet
        self._spell = spell
        self._status: Status | None = None
        self._progress: Progress | None = None
        self._task, self._what = TaskID(0), ""
        self._shown_tenth = 0
        self._shown_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def stage(self, name: str, seconds: float | None = None) -> None:
        """Show a spinner while a stage runs, and a line with its time when it has ended."""
        self._clear()
        if self._quiet:
            return
        if seconds is not None:
            self._line(f"{name:<12} {seconds:6.1f} s")
        elif self._console.is_terminal:
            self._status = self._console.status(f"{name} …")
            self._status.start()

    def note(self, text: str) -> None:
        """Show the line."""
        if not self._quiet:
            self._line(self._spell(text))

    def found(self, program: Program) -> None:
        """Show branches and sites by kind, and what is left dense."""
        if not self._quiet:
            for line in [*found_lines(program), *refusal_lines(program.left_dense)]:
                self._line(line)

    def printed(self, name: str, graph: str) -> None:
        """Show the graph, also with `quiet`, because the user requested it."""
        self._line(f"── after {name}")
        self._line(graph)

    def learning(self, record: StepRecord) -> None:
        """Move the progress bar, or write a plain line from time to time."""
        left = "" if self._console.is_terminal else f"  {record.seconds_left:,.0f} s left"
        self.working("learning", record.step, record.steps, _figures(record) + left)

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        """Move the progress bar, or write a plain line per tenth, and once a minute has passed."""
        if self._quiet:
            return
        if self._console.is_terminal:
            self._move_bar(name, done, total, figures)
            return
        tenth, now = done * _PLAIN_LINES // total, time.monotonic()
        if tenth > self._shown_tenth or now - self._shown_at > _LONGEST_SILENCE_SECONDS:
            self._line(f"step {done}/{total}  {figures}")
            self._shown_at = now
        self._shown_tenth = tenth

    def verified(self, verification: Verification) -> None:
        """Show a failing comparison; the report's table has the passing ones."""
        if not verification.holds and not self._quiet:
            self._line(
                f"{verification.name} at {verification.shape}: relative error "
                f"{verification.max_rel_error:.2e}, at most {verification.tolerance:.0e} is allowed"
            )

    def finished(self, report: Report) -> None:
        """Show the table."""
        self._clear()
        if not self._quiet:
            print_report(report, self._console)
            for note in flattered_notes(report):
                self._line(note)

    def _move_bar(self, name: str, done: int, total: int, figures: str) -> None:
        if self._progress is None or name != self._what:
            self._clear()
            self._what = name
            columns = _columns(self._console.width)
            self._progress = Progress(*columns, console=self._console, transient=True, expand=True)
            self._task = self._progress.add_task("", total=total, completed=done, what=name)
            self._progress.start()
        self._progress.update(self._task, completed=done, description=figures)

    def _clear(self) -> None:
        for live in (self._status, self._progress):
            if live is not None:
                live.stop()
        self._status = self._progress = None

    def _line(self, text: str) -> None:
        # No markup and no wrapping: parameter names may contain brackets, and programs may read the lines.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    """Return the progress and then the figures, cut off at the given number of characters."""
    far = TextColumn("{task.fields[what]} {task.completed}/{task.total}", table_column=Column(no_wrap=True))
    figures = TextColumn(
        "{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    if width < _WIDTH_OF_A_BAR:
        return [far, figures]
    return [far, BarColumn(bar_width=20), figures, TimeRemainingColumn()]


def _figures(record: StepRecord) -> str:
    bad = f"  {record.bad_steps} bad steps" if record.bad_steps else ""
    return (
        f"loss {record.loss:.3f}  removed {record.achieved_ratio:.1%}  "
        f"{record.tokens_per_second:,.0f} tokens/s{bad}"
    )
