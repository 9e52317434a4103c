"""Hold back Ctrl-C and a request to end for the few lines that must happen together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM that arrive inside the block when the block is done.

    Outside the main thread nothing is to be done: Python handles signals in the main thread.
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
    """Let a request to end (SIGTERM) raise KeyboardInterrupt inside the block, as Ctrl-C does.

    Who handles SIGTERM already goes on doing so.
    """
    with ExitStack() as stack:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _interrupt)
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
