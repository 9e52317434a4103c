"""Errors → a short message on stderr and the exit code that says whose fault it is.

| what happens | exit code |
|---|---|
| a `DispfxError` | its own: 2 the input's fault, 1 ours |
| a path that the system does not take, such as one that is too long | 2 |
| a full disk under what the command prints | 2 |
| Ctrl-C | 130, with the way to go on |
| memory that runs out | 2, with the stage and the way to go on |
| anything else | 1, and how to see the traceback |
| wrong arguments | 2 |

Errors name settings as Python does; here they get their flags: `seq_len=512` becomes --seq-len 512.

With `--json`, stdout has `{"error": {"kind", "message", "where", "hint", "exit_code"}}` as well.
"""

import errno
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dispfx.cli.screen import Screen, spelled
from dispfx.errors import (
    EXIT_INPUT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_OUR_FAULT,
    DispfxError,
    MemoryShortage,
    first_line,
    memory_shortage,
)
from dispfx.settings.sections import state_place
from dispfx.words.chosen_device import check_device, local_device

# Too long a name, a loop of links, a place that may not be read, a file where a folder should be, and the
# other way round.
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
# Of what is printed, which has no path.
_OF_PRINTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What pathlib says of `~name` where nobody is called so.
_NO_HOME = "Could not determine home directory"


@contextmanager
def ends_with_message(screen: Screen, given: Mapping[str, Any], *, resumable: bool = False) -> Iterator[None]:
    """Let a verb end in a message and an exit code, never in a traceback.

    Args:
        given: what the verb was given, by the names of settings.
        resumable: whether the verb has `--resume`.

    Raises:
        SystemExit: with the exit code, if the verb fails.
    """
    if not screen.debug:
        warnings.simplefilter("ignore")
    out = given.get("out") if resumable else None
    try:
        check_device(local_device(given.get("device")))
        yield
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        end = Fault("Interrupted", "interrupted", hint=_way_on(out), exit_code=EXIT_INTERRUPTED)
        raise _ended(end, f"interrupted; {end.hint}", screen) from None
    except Exception as error:
        found = error.document if isinstance(error, DispfxError) else None
        way_on = _way_on(out) if resumable else None
        raise _ended(*_fault_of(error, way_on), screen, found) from None


@dataclass(frozen=True)
class Fault:
    """What ended a command, as its JSON tells it."""

    kind: str
    message: str
    where: str | None = None
    hint: str | None = None
    exit_code: int = EXIT_INPUT_FAULT


def print_fault(fault: Fault, document: dict[str, Any] | None = None) -> None:
    """Print a fault as JSON, with what the command had found before."""
    Screen(json=True, quiet=True).print_json({**(document or {}), "error": asdict(fault)})


def refused(error: DispfxError, words: Sequence[str]) -> SystemExit:
    """Tell an error from before a verb runs, and return what ends the process with its exit code.

    Args:
        words: of the command line, which may ask for JSON.
    """
    return _ended(*_fault_of(error, None), Screen(json="--json" in words))


def _fault_of(error: Exception, way_on: str | None) -> tuple[Fault, str]:
    """Return what ended a command, and how people are told."""
    told = _out_of_memory(error, way_on) or _refused_path(error)
    if told is None and not isinstance(error, DispfxError):
        hint = "run again with --debug to see where"
        fault = Fault(type(error).__name__, str(error), hint=hint, exit_code=EXIT_OUR_FAULT)
        return fault, f"error: {first_line(error)}\n  {hint}"
    told = told or error
    assert isinstance(told, DispfxError)
    hint = None if told.hint is None else spelled(told.hint)
    shown = DispfxError(spelled(told.problem), where=told.where, hint=hint)
    fault = Fault(type(told).__name__, shown.problem, shown.where, shown.hint, told.exit_code)
    return fault, f"error: {shown}"


def _ended(fault: Fault, message: str, screen: Screen, document: dict[str, Any] | None = None) -> SystemExit:
    """Tell what ended a command, and return what ends the process with its exit code."""
    _say(message, screen.debug)
    # Of several processes, the leading one alone prints results.
    if screen.json and os.environ.get("RANK", "0") == "0":
        print_fault(fault, document)
    return SystemExit(fault.exit_code)


def _out_of_memory(error: Exception, way_on: str | None) -> MemoryShortage | None:
    """Return the error for memory that ran out, with the way to go on, or None."""
    told = memory_shortage(error)
    if told is None:
        return None
    if isinstance(error, MemoryShortage):
        problem, hint = error.problem, error.hint
    else:
        problem, hint = f"memory ran out: {first_line(told)}", "end other programs, or use a larger machine"
    return MemoryShortage(problem, hint=hint if way_on is None else f"{hint}; {way_on}")


def _refused_path(error: Exception) -> DispfxError | None:
    """Return the error for a path that the system does not take, a full one among them, or None."""
    if isinstance(error, RuntimeError) and _NO_HOME in str(error):
        return DispfxError("a path begins with ~ and a name, and there is no user of that name")
    if isinstance(error, OSError) and error.errno in _OF_PRINTING and error.filename is None:
        return DispfxError(
            f"what this command prints cannot be written: {error.strerror}",
            hint="make room where it goes, or send it elsewhere",
        )
    if not isinstance(error, OSError) or error.errno not in _OF_PATHS or error.filename is None:
        return None
    path = os.fsdecode(error.filename)
    return DispfxError(f"the system does not take this path: {error.strerror}", where=path[:200])


def _way_on(out: Path | None) -> str:
    """Return how to go on; `out` is what a verb that can resume was to write."""
    if out is None or not out.name:
        return "nothing was written"
    state = state_place(out)
    if not state.is_dir():
        return "no state was saved yet, so run the same command again"
    if "RANK" in os.environ:
        # How the processes were started is not known here.
        return f"run the same command with --resume to go on from {state}"
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return f"the state is in {state}; to go on:\n  {shlex.join(['dispfx', *words, '--resume'])}"


def _say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    # Of several processes, each says who it is; nothing here may wait for torch.
    rank = os.environ.get("RANK")
    print(message if rank is None else f"rank {rank}: {message}", file=sys.stderr)
