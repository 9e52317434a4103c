"""Tell an observer how a command goes: its stages with their times, and the graph after a pass.

with printing(["lower-gates"], observer):
    ...                                 # every pipeline in here prints after lower-gates
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from dispfx.compiler.stages import PASSES
from dispfx.errors import DispfxError, MemoryShortage, first_line, memory_shortage
from dispfx.ir.pipeline import printing_after
from dispfx.report import NullObserver, Observer
from dispfx.words.choices import require_choice
from dispfx.words.option_names import option

# What makes a stage need less memory; the others need what they need.
_LESS = {
    "open": f"{option('dtype', 'bfloat16')} halves float32 weights",
    "learn": f"use a smaller {option('batch_size')} or {option('seq_len')}, "
    f"or {option('checkpointing', 'on')}",
    "tune": f"use a smaller {option('batch_size')} or {option('seq_len')}",
}
_MORE = "end other programs, or use a machine or a card with more memory"


class Stages:
    """Seconds by stage, in the order they ran; a stage that runs twice adds up."""

    def __init__(self, observer: Observer):
        self.observer = observer
        self.seconds: dict[str, float] = {}

    def say(self, notes: Iterable[str]) -> None:
        """Tell the observer what a user should know, a line each."""
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
    """Give graphs after the passes of these names to an observer; note which of them did not run.

    Raises:
        DispfxError: if there is no pass of a name, listing the passes that there are.
    """
    for name in names:
        require_choice(PASSES, name, "a pass to print after")
    watcher = observer or NullObserver()
    with printing_after(names, watcher.printed) as printer:
        yield
    for name in dict.fromkeys(names):
        if name not in printer.printed:
            watcher.note(f"{name} did not run in this command, so there is no graph to print after it")
