"""Time the stages of a command, and tell an observer as each begins and ends."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dispfx.report import Observer


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
        """Time the block as stage `name`."""
        self.observer.stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.observer.stage(name, self.seconds[name])
