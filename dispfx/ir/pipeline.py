"""Passes and the pipeline that runs them.

A pass has a name, declares the levels that it requires and ensures, and changes one `Program`.  The
pipeline checks its claim to have changed something, and verifies the graph after it.  Notes of passes go to
the logger `dispfx.passes`, at level INFO.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dispfx.errors import DispfxError, PassError
from dispfx.ir.printer import print_program, signature
from dispfx.ir.program import Program
from dispfx.ir.spec import verify_program
from dispfx.words.given import shown

_LOG = logging.getLogger("dispfx.passes")


@dataclass(frozen=True)
class PassResult:
    """The result of a pass.

    Args:
        changed: whether the graph or a fact has changed.
        note: one line for people, which is logged.
    """

    changed: bool
    note: str = ""


@runtime_checkable
class Pass(Protocol):
    """One step of the compiler.

    Attributes:
        name: as on the command line.
        requires: level that the program must have reached.
        ensures: level of the program after the pass.
    """

    name: str
    requires: str
    ensures: str

    def run(self, program: Program) -> PassResult:
        """Rewrite the program or add facts to it."""
        ...


@dataclass(frozen=True)
class Ran:
    """One pass of a finished pipeline."""

    name: str
    result: PassResult


@dataclass(frozen=True)
class Printer:
    """Prints graphs after named passes.

    Args:
        names: of the passes.
        show: receives the name and the printed graph.
        printed: for each name that ran, the graphs that were printed; equal graphs are printed once.
    """

    names: Sequence[str]
    show: Callable[[str, str], None]
    printed: dict[str, set[str]] = field(default_factory=dict)

    def ran(self, name: str, program: Program) -> None:
        """Print the program if its last pass is one of the named ones."""
        if name not in self.names:
            return
        text, before = print_program(program), self.printed.setdefault(name, set())
        if text not in before:
            before.add(text)
            self.show(name, text)


def further_passes(passes: Sequence[Pass], level: str, taken: Sequence[str] = ()) -> list[Pass]:
    """Return the user's passes, after checking that they can run on a program of a level.

    Args:
        level: of the program, which the passes must keep.
        taken: names of the passes that ran before.

    Raises:
        DispfxError: if one is not a pass, has a taken name, or is for another level.
    """
    names = list(taken)
    if not isinstance(passes, Iterable):
        raise DispfxError(f"a list of passes was expected, but {shown(passes)} was given")
    for step in passes:
        if not isinstance(step, Pass) or isinstance(step, type):
            given = step.__name__ if isinstance(step, type) else type(step).__name__
            raise DispfxError(
                f"a pass is an object with name, requires, ensures and run, but {given} was given",
                hint="docs/contributing.md has a complete pass",
            )
        if step.name in names:
            raise DispfxError(f"pass names must be unique, and {step.name!r} is taken")
        if (step.requires, step.ensures) != (level, level):
            raise DispfxError(
                f"pass {step.name} must require and ensure a {level} program, and it says {step.requires}, "
                f"{step.ensures}"
            )
        names.append(step.name)
    return list(passes)


# A command runs pipelines in many places, so printing belongs to the command and not to a pipeline.
_PRINTER: ContextVar[Printer | None] = ContextVar("printer", default=None)


@contextmanager
def printing_after(names: Sequence[str], show: Callable[[str, str], None]) -> Iterator[Printer]:
    """Print graphs in every pipeline that runs inside the block, and return what was printed."""
    printer = Printer(names, show)
    token = _PRINTER.set(printer)
    try:
        yield printer
    finally:
        _PRINTER.reset(token)


@dataclass
class Pipeline:
    """Run passes in order.

    Args:
        passes: what to run.
        verify: check the validity of the graph and the claims of the pass after every pass.
    """

    passes: Sequence[Pass]
    verify: bool = True
    ran: list[Ran] = field(default_factory=list)

    def run(self, program: Program) -> Program:
        """Run every pass on `program` and return it.

        Raises:
            PassError: if a pass runs at a wrong level, breaks the graph, or makes a wrong claim.
        """
        for step in self.passes:
            self._run_one(step, program)
            if (printer := _PRINTER.get()) is not None:
                printer.ran(step.name, program)
        return program

    def _run_one(self, step: Pass, program: Program) -> None:
        if program.level != step.requires:
            raise self._broken(step, f"it needs a {step.requires} program, this one is {program.level}")
        before = signature(program) if self.verify else None
        try:
            result = step.run(program)
        except DispfxError:
            raise
        except Exception as error:
            raise self._broken(step, f"{type(error).__name__}: {error}") from error
        if not isinstance(result, PassResult):
            raise self._broken(step, f"it must return a PassResult, and returned {type(result).__name__}")
        program.level = step.ensures
        self.ran.append(Ran(step.name, result))
        if result.note:
            _LOG.info("%s: %s", step.name, result.note)
        if self.verify:
            self._check(step, program, result.changed, before != signature(program))

    def _check(self, step: Pass, program: Program, claimed: bool, changed: bool) -> None:
        problem = verify_program(program)
        if problem is not None:
            raise self._broken(step, problem)
        if claimed != changed:
            raise self._broken(step, f"it claims changed={claimed}, and changed={changed} is true")

    def _broken(self, step: Pass, problem: str) -> PassError:
        before = ", ".join(ran.name for ran in self.ran) or "none"
        ours = type(step).__module__.startswith("dispfx.")
        return PassError(
            f"pass {step.name}: {problem}",
            where=f"passes that ran before: {before}",
            hint="this is a bug in dispfx; please report it with the model's class"
            if ours
            else f"this pass is not part of dispfx: see {type(step).__module__}.{type(step).__qualname__}",
        )
