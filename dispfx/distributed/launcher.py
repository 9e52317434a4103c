"""A rank does not outlive the process that started it.

1. A rank looks twice a second whether its parent is still the process that started it.  The kernel gives a
   process another parent when its own dies, also by SIGKILL.
2. The rank is then interrupted as by Ctrl-C, so that a state of learning is saved and a half-written folder
   is removed.
3. A rank that waits inside a library, as at rendezvous, does not hear of that.  An alarm ends it after a few
   seconds, also where the interpreter is ending already and runs no other thread.

Nothing here imports torch: a rank looks before its first slow import.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from dispfx.errors import EXIT_INTERRUPTED

# Set by `--launch`, so that a launcher that died before its rank could look is noticed too.
LAUNCHER = "DISPFX_LAUNCHER"
_PERIOD_SECONDS = 0.5
_GRACE_SECONDS = 6.0
_watching = False


def end_with_launcher() -> None:
    """Let this process end within ten seconds of its launcher, if it is one rank of a run."""
    global _watching
    if _watching or "RANK" not in os.environ or not hasattr(signal, "SIGKILL"):
        return
    _watching = True
    launcher = os.environ.get(LAUNCHER, "")
    parent = int(launcher) if launcher.isdecimal() else os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="launcher", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PERIOD_SECONDS)
    rank = os.environ.get("RANK")
    with suppress(OSError, ValueError):  # what it would be printed to may have ended too
        # Where a library is kept quiet, sys.stderr leads elsewhere.
        message = f"rank {rank}: the process that started this run has ended, so this one ends"
        print(message, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
    # A process in the background of a shell ignores SIGINT.
    heard = callable(signal.getsignal(signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT if heard else signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)  # the alarm may be somebody else's
    os._exit(EXIT_INTERRUPTED)
