"""Processes that tests start: none of them outlives its test, and none is waited for without end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str] | None = None, *, together: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a program of this interpreter, which is ended with all that it started when the block is left.

    Args:
        words: behind `python -m`.
        environment: instead of this process's own.  In either torch gets one thread, and the program is no
            rank of a run.
        together: let what it says of errors come with what it prints.
    """
    given = os.environ if environment is None else environment
    kept = {name: value for name, value in given.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
        env={**kept, "OMP_NUM_THREADS": "1"},
        # A group of its own, by which everything that it starts can be reached.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def run_code(
    code: str, *arguments: str, seconds: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code in an interpreter of its own, in the checkout and with its modules.

    Args:
        arguments: behind the code.
        seconds: that it may take.
        variables: of its environment, beside those of this process.

    Raises:
        subprocess.TimeoutExpired: when it takes longer.
    """
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def wait_until(
    reached: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float, what: str
) -> None:
    """Wait for what a program does while it runs.

    Raises:
        AssertionError: when it has ended before, with what it said, or when it takes longer.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        assert process.poll() is None, f"it ended before {what}: {process.communicate(timeout=10)}"
        assert time.monotonic() < deadline, f"{seconds:g} seconds went by without {what}"
        time.sleep(0.02)


def join_all(processes: Sequence[BaseProcess], *, seconds: float) -> None:
    """Wait for processes, all of them together so long at most, and end those that go on.

    Python itself would wait for them without end when it exits.

    Raises:
        AssertionError: when one had to be ended.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [process for process in processes if process.exitcode is None]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, f"{len(hung)} of {len(processes)} processes were still running after {seconds:g} seconds"
