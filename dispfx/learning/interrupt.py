"""Hold back Ctrl-C for the few lines that must happen together."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Deliver an interrupt (SIGINT) that arrives inside the block when the block is done.

    Outside the main thread nothing is to be done: Python raises KeyboardInterrupt in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    arrived = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(*arrived[0])
