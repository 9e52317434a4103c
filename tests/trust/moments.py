"""Moments of a run, counted by the run itself, and its death at one of them.

A moment is a phase and a number: the fifth time that the run touches its state, the second file of its
folder.  A run does the same every time, so a moment that one run has had is one that another will have,
however busy the machine is; a clock would not say so.  Killed there, a process has no chance to tidy up:
SIGKILL from itself is SIGKILL.
"""

import json
import mmap
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from dispfx.ir.pipeline import Pipeline
from dispfx.learning import learner

PHASES = ("passes", "learning", "state", "folder", "onnx", "publishing", "tidying")
Moment = tuple[str, int]

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree")
_PAGE = 4096


class Moments:
    """Counts the moments of a process that is forked later, and ends it at one of them.

    Args:
        out: the folder that the run writes.
        kill_at: phase, and how many moments of it come before; never by default.
        torn: share of its bytes that a file keeps which was being written at that moment.
    """

    def __init__(self, out: Path, kill_at: Moment | None = None, torn: float = 0.5):
        self._out, self._state = str(out), f"{out}.state"
        self._partial = f"{out}.partial-"
        self._kill_at, self._torn = kill_at, torn
        self._counts: Counter[str] = Counter()
        self._removing = ""
        # What a child writes here its parent reads, dead or alive.
        self._shared = mmap.mmap(-1, _PAGE)

    @property
    def counts(self) -> dict[str, int]:
        """Moments that the process has had, by phase."""
        return json.loads(self._shared[:].rstrip(b"\0") or b"{}")

    def begin(self) -> None:
        """Count from now on, in the process that calls this."""
        self._main = threading.get_ident()
        self._announce(Pipeline, "run", "passes")
        for name in ("advance", "_optimize", "_move_on"):
            self._announce(learner.Learner, name, "learning")
        self._announce(learner, "backward_decoder", "learning")
        self._tear()
        sys.addaudithook(self._see)

    def _announce(self, owner: Any, name: str, phase: str) -> None:
        """Make the beginning and the end of each call a moment."""
        call: Callable[..., Any] = getattr(owner, name)

        def announced(*args: Any, **kwargs: Any) -> Any:
            self._reach(phase)
            result = call(*args, **kwargs)
            self._reach(phase)
            return result

        setattr(owner, name, announced)

    def _tear(self) -> None:
        """Make a moment of every safetensors file, at which a part of it is written."""
        owner: Any = safetensors.torch  # the function that its `save_file` calls
        write: Callable[..., Any] = owner.serialize_file

        def torn(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            phase = self._phase(str(filename))
            if phase is not None and self._is_next(phase):
                write(tensors, filename, *args, **kwargs)
                os.truncate(filename, int(self._torn * os.path.getsize(filename)))
            if phase is not None:
                self._reach(phase)
            return write(tensors, filename, *args, **kwargs)

        owner.serialize_file = torn

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or threading.get_ident() != self._main:
            return
        path = arguments[1] if event == "os.rename" else arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        if event == "shutil.rmtree":
            self._removing = name
        elif not os.path.isabs(name):  # below what is being removed, by its descriptor
            name = self._removing
        phase = self._phase(name)
        if phase is not None:
            self._reach(phase)

    def _phase(self, path: str) -> str | None:
        if path.startswith(self._state):
            return "tidying" if os.path.exists(self._out) else "state"
        if path.startswith(self._partial):
            return "onnx" if "onnx" in path.removeprefix(self._partial) else "folder"
        return "publishing" if path == self._out or os.path.dirname(path) == self._out else None

    def _is_next(self, phase: str) -> bool:
        return self._kill_at == (phase, self._counts[phase])

    def _reach(self, phase: str) -> None:
        is_last = self._is_next(phase)
        self._counts[phase] += 1
        text = json.dumps(self._counts).encode()
        self._shared[: len(text)] = text
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
