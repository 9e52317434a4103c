"""Every error that dispfx raises on purpose, and whose fault each one is.

`DispfxError` is the base.  `PassError` and `VerificationError` are our fault (exit code 1); every
other one means that the input cannot be used as it is (exit code 2).

A message answers four questions: what was required, what was found, where in the user's model or
file, and what to do next.
"""

import errno
import re
from typing import Any

EXIT_OUR_FAULT = 1
EXIT_INPUT_FAULT = 2
EXIT_INTERRUPTED = 130

_LONGEST_LINE = 300
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|[Cc]annot allocate memory|not enough memory|"
    r"bad_alloc|bad allocation|[Ff]ailed to allocate memory|CU[A-Z]+_STATUS_ALLOC_FAILED"
)


class DispfxError(Exception):
    """Base of every error raised on purpose.

    Args:
        problem: what was required and what was found instead.
        where: the parameter, module path, file or source line concerned.
        hint: what the user can do next.
    """

    exit_code = EXIT_INPUT_FAULT
    # Results of the command so far, for its JSON.
    document: dict[str, Any] | None = None

    def __init__(self, problem: str, *, where: str | None = None, hint: str | None = None):
        super().__init__(problem)
        self.problem = problem
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.problem]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  try:   {self.hint}")
        return "\n".join(lines)


class UsageError(DispfxError):
    """An argument of a command is missing, unknown, or invalid."""


class UnknownSettingError(DispfxError, TypeError):
    """A keyword or a field of a settings file is not a known setting."""


class SourceError(DispfxError):
    """MODEL cannot be found, read or built."""


class CaptureError(DispfxError):
    """torch.export cannot turn the module into a graph, or the graph is fixed to one shape."""


class UnsupportedGraphError(DispfxError):
    """The graph has no residual stream or nothing in it can be pruned."""


class PlanMismatchError(DispfxError):
    """A plan was made for another decoder than the one it is applied to."""


class BudgetError(DispfxError):
    """The requested ratio cannot be met by the existing sites."""


class DataError(DispfxError):
    """The text or token file is missing, empty, too short or unreadable."""


class OutputError(DispfxError):
    """The output folder exists, cannot be written, or is not a dispfx folder."""


class MemoryShortage(DispfxError):
    """The machine or the GPU has less memory than the work needs."""


class PassError(DispfxError):
    """A pass broke a rule of the compiler; the message names it and the passes that ran before."""

    exit_code = EXIT_OUR_FAULT


class VerificationError(DispfxError):
    """Two forms of the same pruned decoder disagree by more than their tolerance."""

    exit_code = EXIT_OUR_FAULT


def memory_shortage(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error, which may be this error or one of its causes, or None.

    Python, torch, safetensors and ONNX Runtime word it differently.  Memory errors of dispfx itself do not
    count.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if not isinstance(cause, DispfxError) and _is_of_memory(cause):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return bool(_OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, prefixed with its type unless it is a `DispfxError`.

    If that line only announces the next one, such as a compiler's `raised:`, both are joined.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    kind = "" if isinstance(error, DispfxError) else type(error).__name__
    return ": ".join(part for part in (kind, message[:_LONGEST_LINE]) if part)
