"""Defer Ctrl-C and termination signals during a critical section."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# Closing a terminal sends SIGHUP, on systems that have it.
_REQUESTS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_SIGNALS = (signal.SIGINT, *_REQUESTS)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver SIGINT, SIGTERM and SIGHUP that arrive inside the block after the block.

    Does nothing outside the main thread: Python handles signals in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    held = [number for number, handler in before.items() if callable(handler)]
    for number in held:
        signal.signal(number, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for number, frame in arrived[:1]:
            handler = before[signal.Signals(number)]
            assert callable(handler)
            handler(number, frame)


@contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, as Ctrl-C does.

    Existing handlers stay in place, and ignored signals stay ignored.
    """
    with ExitStack() as stack:
        main = threading.current_thread() is threading.main_thread()
        for number in _REQUESTS:
            if main and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _interrupt)
                stack.callback(signal.signal, number, signal.SIG_DFL)
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
