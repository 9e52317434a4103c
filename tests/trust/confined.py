"""Run one piece of work with little memory and time, and see what it touches and how it ends."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dispfx.errors import EXIT_INPUT_FAULT, DispfxError

SECONDS = 10
MORE_BYTES = 2 * 2**30
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOVES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)
_PROCESSES = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")


class TooLong(BaseException):
    """The work took longer than it may; no handler of ordinary errors sees it."""


def limit_memory() -> None:
    """Let this process have little more memory than it has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_BYTES, resource.RLIM_INFINITY))


class Watch:
    """Sees what the process opens, moves and starts, through Python's audit events.

    Args:
        folder: where it may write.
        canary: a file that nothing has a reason to read.
    """

    def __init__(self, folder: Path, canary: Path):
        self._inside = str(folder.resolve())
        self._canary = str(canary.resolve())
        self.touched: list[str] = []
        self.on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _PROCESSES:
            self.touched.append(f"{event} {arguments[0]}")
        elif event in _MOVES:
            for path in arguments:
                if isinstance(path, str | bytes | os.PathLike) and not self._may_write(path):
                    self.touched.append(f"{event} {path!r}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            self._see_open(*arguments)

    def _see_open(self, path: str | bytes, mode: str | None, flags: int) -> None:
        writes = bool(flags & _WRITES) if mode is None else any(letter in mode for letter in "wax+")
        if writes and not self._may_write(path):
            self.touched.append(f"write {path!r}")
        if os.path.realpath(os.fsdecode(path)) == self._canary:
            self.touched.append(f"read {path!r}")

    def _may_write(self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return real.startswith(self._inside) or real == os.devnull


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(work: Callable[[], object], watch: Watch) -> tuple[str, str | None]:
    """Return how a piece of work ended, "accepted" or "refused", and what is wrong with that or None."""
    watch.touched.clear()
    watch.on = True
    try:
        with _at_most(SECONDS):
            work()
        ended, fault = "accepted", None
    except DispfxError as error:
        ended, fault = "refused", None
        if error.exit_code != EXIT_INPUT_FAULT:
            fault = f"{type(error).__name__}, which is our fault: {error}"
    except TooLong:
        ended, fault = "hung", f"took more than {SECONDS} seconds"
    except BaseException as error:
        ended, fault = "failed", f"{type(error).__name__}: {error} ({_place(error)})"
    finally:
        watch.on = False
    if watch.touched:
        fault = f"{fault or ''} touched {watch.touched[:3]}"
    return ended, fault


def _place(error: BaseException) -> str:
    at, found = error.__traceback__, "?"
    while at is not None:
        name = at.tb_frame.f_code.co_filename
        if "dispfx" in name or "/passes/" in name:
            found = f"{'/'.join(Path(name).parts[-2:])}:{at.tb_lineno}"
        at = at.tb_next
    return found
