"""Notify an observer of a command's stages with their times, and print the graph after a pass.

with printing(["lower-gates"], observer):
    ...                                 # every pipeline in here prints after lower-gates
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dispfx.compiler.pipelines import PASSES
from dispfx.errors import DispfxError, MemoryShortage, first_line, memory_shortage
from dispfx.ir.pipeline import printing_after
from dispfx.report import NullObserver, Observer
from dispfx.words.choices import require_choice
from dispfx.words.given import names_given, shown
from dispfx.words.option_names import option

# How to reduce the memory of a stage; there is no way for other stages.
_LESS = {
    "open": f"{option('dtype', 'bfloat16')} halves float32 weights",
    "learn": f"use a smaller {option('batch_size')} or {option('seq_len')}, "
    f"or {option('checkpointing', 'on')}",
    "recover": f"use a smaller {option('batch_size')} or {option('seq_len')}",
}
_MORE = "end other programs, or use a machine or a GPU with more memory"


def observer_given(observer: Any) -> Observer:
    """Return an observer that was given, and one that shows nothing for None.

    Raises:
        DispfxError: if it lacks a method, which it would otherwise do in the middle of a run.
    """
    if observer is None:
        return NullObserver()
    events = [name for name in vars(Observer) if not name.startswith("_")]
    for name in events:
        if not callable(getattr(observer, name, None)):
            raise DispfxError(
                f"an observer with the method {name} was expected, but {shown(observer)} was given",
                hint="derive yours from dispfx.report.NullObserver",
            )
    return observer


class Stages:
    """Seconds by stage, in order; the times of a stage that runs twice are added."""

    def __init__(self, observer: Observer | None = None):
        self.observer = observer_given(observer)
        self.seconds: dict[str, float] = {}

    def say(self, notes: Iterable[str]) -> None:
        """Pass notes for the user to the observer."""
        for line in notes:
            self.observer.note(line)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`.

        Raises:
            MemoryShortage: if memory runs out, naming the stage.
        """
        self.observer.stage(name)
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            if isinstance(error, MemoryShortage) or (told := memory_shortage(error)) is None:
                raise
            raise _shortage(name, told) from error
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.observer.stage(name, self.seconds[name])


def _shortage(stage: str, told: BaseException) -> DispfxError:
    problem = f"memory ran out in stage {stage}: {first_line(told)}"
    return MemoryShortage(problem, hint=_LESS.get(stage, _MORE))


@contextmanager
def printing(names: Sequence[str], observer: Observer | None = None) -> Iterator[None]:
    """Pass the graphs after the named passes to an observer; note which passes did not run.

    Raises:
        DispfxError: if a name is unknown, listing all passes.
    """
    names = names_given(names, "print_after")
    for name in names:
        require_choice(PASSES, name, "a pass to print after")
    watcher = observer_given(observer)
    with printing_after(names, watcher.printed) as printer:
        yield
    for name in dict.fromkeys(names):
        if name not in printer.printed:
            watcher.note(f"{name} did not run in this command, so there is no graph to print after it")
