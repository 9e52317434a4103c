"""An interrupt waits for the block to end and is then delivered."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from dispfx.learning.interrupt import ending_as_interrupt, uninterrupted


@pytest.fixture(autouse=True)
def _as_at_a_terminal() -> Iterator[None]:
    """A shell lets what it runs in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_inside_the_block_arrives_when_the_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the rest of the block")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens():
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_can_be_used_outside_the_main_thread():
    entered = []

    def work() -> None:
        with uninterrupted():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_request_to_end_is_an_interrupt_and_waits_like_one():
    done = []
    with pytest.raises(KeyboardInterrupt), ending_as_interrupt(), uninterrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("the rest of the block")
    assert done == ["the rest of the block"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_who_handles_a_request_to_end_already_goes_on_doing_so():
    arrived = []
    signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        with ending_as_interrupt(), uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
