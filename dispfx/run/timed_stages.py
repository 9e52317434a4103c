"""Time the stages of a command, and tell an observer as each begins and ends."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dispfx.errors import DispfxError, MemoryShortage, first_line, memory_shortage
from dispfx.report import Observer
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
