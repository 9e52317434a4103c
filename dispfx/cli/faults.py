"""Errors → a short message on stderr and the exit code that says whose fault it is.

| what happens | exit code |
|---|---|
| a `DispfxError` | its own: 2 the input's fault, 1 ours |
| a path that the system rejects, such as one that is too long | 2 |
| a full disk where the output is redirected to | 2 |
| Ctrl-C | 130, with how to resume |
| out of memory | 2, with the stage and how to resume |
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

# A name that is too long, a loop of links, no permission, a file instead of a folder, and a folder instead of
# a file.
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
# Errors of stdout, which has no path.
_OF_PRINTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# pathlib's message for `~name` if there is no such user.
_NO_HOME = "Could not determine home directory"


@contextmanager
def ends_with_message(screen: Screen, given: Mapping[str, Any], *, resumable: bool = False) -> Iterator[None]:
    """Turn errors of a verb into a message and an exit code, without a traceback.

    Args:
        given: the arguments of the verb, by setting name.
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
    """Why a command failed, as printed with --json."""

    kind: str
    message: str
    where: str | None = None
    hint: str | None = None
    exit_code: int = EXIT_INPUT_FAULT


def print_fault(fault: Fault, document: dict[str, Any] | None = None) -> None:
    """Print a fault as JSON, with the results so far."""
    Screen(json=True, quiet=True).print_json({**(document or {}), "error": asdict(fault)})


def refused(error: DispfxError, words: Sequence[str]) -> SystemExit:
    """Print an error from before a verb runs, and return the SystemExit with its exit code.

    Args:
        words: the command line, which may contain --json.
    """
    return _ended(*_fault_of(error, None), Screen(json="--json" in words))


def _fault_of(error: Exception, way_on: str | None) -> tuple[Fault, str]:
    """Return the fault of a command, and the message for people."""
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
    """Print why a command failed, and return the SystemExit with its exit code."""
    _say(message, screen.debug)
    # With several processes, only the leader prints results.
    if screen.json and os.environ.get("RANK", "0") == "0":
        print_fault(fault, document)
    return SystemExit(fault.exit_code)


def _out_of_memory(error: Exception, way_on: str | None) -> MemoryShortage | None:
    """Return the error for an out-of-memory condition, with how to resume, or None."""
    told = memory_shortage(error)
    if told is None:
        return None
    if isinstance(error, MemoryShortage):
        problem, hint = error.problem, error.hint
    else:
        problem, hint = f"memory ran out: {first_line(told)}", "end other programs, or use a larger machine"
    return MemoryShortage(problem, hint=hint if way_on is None else f"{hint}; {way_on}")


def _refused_path(error: Exception) -> DispfxError | None:
    """Return the error for a path that the system rejects, or for a full disk, or None."""
    if isinstance(error, RuntimeError) and _NO_HOME in str(error):
        return DispfxError("a path begins with ~ and a name, and there is no user of that name")
    if isinstance(error, OSError) and error.errno in _OF_PRINTING and error.filename is None:
        return DispfxError(
            f"the output of this command cannot be written: {error.strerror}",
            hint="free space where it is redirected to, or redirect it elsewhere",
        )
    if not isinstance(error, OSError) or error.errno not in _OF_PATHS or error.filename is None:
        return None
    path = os.fsdecode(error.filename)
    return DispfxError(f"the system rejects this path: {error.strerror}", where=path[:200])


def _way_on(out: Path | None) -> str:
    """Return how to resume; `out` is the output path of a verb that can resume."""
    if out is None or not out.name:
        return "nothing was written"
    state = state_place(out)
    if not state.is_dir():
        return "no state was saved yet, so run the same command again"
    if "RANK" in os.environ:
        # It is unknown here how the processes were started.
        return f"run the same command with --resume to go on from {state}"
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return f"the state is in {state}; to go on:\n  {shlex.join(['dispfx', *words, '--resume'])}"


def _say(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    # With several processes, messages name the rank; nothing here may wait for torch.
    rank = os.environ.get("RANK")
    print(message if rank is None else f"rank {rank}: {message}", file=sys.stderr)
