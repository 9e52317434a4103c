"""Passes and the pipeline that runs them.

A pass has a name, says what it needs and what it promises, and changes one `Program`.  The pipeline
times it, checks its claim to have changed something, and verifies the graph after it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dispfx.errors import DispfxError, PassError
from dispfx.ir.printer import print_program, signature
from dispfx.ir.program import Program
from dispfx.ir.spec import verify_program


@dataclass(frozen=True)
class PassResult:
    """What a pass did.

    Args:
        changed: whether the graph or a fact is different now.
        note: one line for people.
    """

    changed: bool
    note: str = ""


@runtime_checkable
class Pass(Protocol):
    """One step of the compiler.

    Attributes:
        name: as on the command line.
        requires: stage that the program must have reached.
        ensures: stage that it has after.
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
    seconds: float
    result: PassResult


@dataclass
class Pipeline:
    """Run passes in order.

    Args:
        passes: what to run.
        print_after: names of passes after which the graph is given to `show`.
        show: receives the pass's name and the printed graph.
        verify: check the graph's validity, and the claim of each pass, after each pass.
    """

    passes: Sequence[Pass]
    print_after: Sequence[str] = ()
    show: Callable[[str, str], None] | None = None
    verify: bool = True
    ran: list[Ran] = field(default_factory=list)

    def run(self, program: Program) -> Program:
        """Run every pass on `program` and return it.

        Raises:
            PassError: if a pass is out of place, breaks the graph, or claims what it did not do.
        """
        for step in self.passes:
            self._run_one(step, program)
            if step.name in self.print_after and self.show is not None:
                self.show(step.name, print_program(program))
        return program

    def _run_one(self, step: Pass, program: Program) -> None:
        if program.stage != step.requires:
            raise self._broken(step, f"it needs a {step.requires} program, this one is {program.stage}")
        before = signature(program) if self.verify else None
        start = time.perf_counter()
        try:
            result = step.run(program)
        except DispfxError:
            raise
        except Exception as error:
            raise self._broken(step, f"{type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - start
        program.stage = step.ensures
        self.ran.append(Ran(step.name, seconds, result))
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
        return PassError(
            f"pass {step.name}: {problem}",
            where=f"passes that ran before: {before}",
            hint="this is a fault of dispfx; please report it with the model's class",
        )
