"""Time the stages of a command, and notify an observer when a stage begins and ends."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dispfx.errors import DispfxError, MemoryShortage, first_line, memory_shortage
from dispfx.report import Observer

# How to reduce the memory of a stage; there is no way for other stages.
_LESS = {
    "open": "--dtype bfloat16 halves float32 weights",
    "learn": "use a smaller --batch-size or --seq-len, or --checkpointing on",
    "tune": "use a smaller --batch-size or --seq-len",
}
_MORE = "end other programs, or use a machine or a GPU with more memory"


class Stages:
    """Seconds by stage, in order; the times of a stage that runs twice are added."""

    def __init__(self, observer: Observer):
        self.observer = observer
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
