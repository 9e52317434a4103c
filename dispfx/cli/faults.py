"""Errors → a short message on stderr and the exit code that says whose fault it is.

| what happens | exit code |
|---|---|
| a `DispfxError` | its own: 2 the input's fault, 1 ours |
| a path that the system does not take, such as one that is too long | 2 |
| a full disk under what the command prints | 2 |
| Ctrl-C | 130, with the way to go on |
| anything else | 1, and how to see the traceback |
| wrong arguments | 2, from typer |
"""

import errno
import functools
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from dispfx.chosen_device import chosen_device, local_device
from dispfx.errors import EXIT_INTERRUPTED, EXIT_OUR_FAULT, DispfxError, first_line

# Too long a name, a loop of links, a place that may not be read, a file where a folder should be, and the
# other way round.
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR, errno.EISDIR)
# Of what is printed, which has no path.
_OF_PRINTING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What pathlib says of `~name` where nobody is called so.
_NO_HOME = "Could not determine home directory"


def reports_faults(verb: Callable[..., None]) -> Callable[..., None]:
    """Wrap a verb, which takes `debug`, so that it ends in a message and never in a traceback."""

    @functools.wraps(verb)
    def run(**options: Any) -> None:
        debug = options["debug"]
        if not debug:
            warnings.simplefilter("ignore")
        try:
            chosen_device(local_device(options.get("device")))
            verb(**options)
        except (typer.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _say(f"interrupted; {_way_on(options)}", debug)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except DispfxError as error:
            _say(f"error: {error}", debug)
            raise typer.Exit(error.exit_code) from None
        except Exception as error:
            if (refused := _refused_path(error)) is not None:
                _say(f"error: {refused}", debug)
                raise typer.Exit(refused.exit_code) from None
            _say(f"error: {first_line(error)}\n  run again with --debug to see where", debug)
            raise typer.Exit(EXIT_OUR_FAULT) from None

    return run


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


def state_folder(out: Path) -> Path:
    """Return where a run that writes `out` keeps its resumable state."""
    return out.with_name(out.name + ".state")


def _way_on(options: dict[str, Any]) -> str:
    out = options.get("out")
    if "resume" not in options or out is None:
        return "nothing was written"
    state = state_folder(out)
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
