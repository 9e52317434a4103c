"""What goes wrong with the disk, as a message that says where and what to do.

The libraries that write for us say the same in different ways: Python as an OSError, safetensors in the words
"I/O error: … (os error 28)", torch's archives without a number.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dispfx.errors import OutputError

# Of all the errors that work may meet, these concern the disk under it.
_NUMBERS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM,
)  # fmt: skip
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_ARCHIVE = "PytorchStreamWriter failed writing"


def disk_fault(error: BaseException) -> str | None:
    """Return what is wrong with the disk, or None where the error is about something else."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _NUMBERS else None
    if isinstance(error, SafetensorError) and (number := _NUMBERED.search(str(error))):
        return os.strerror(int(number[1])) if int(number[1]) in _NUMBERS else None
    if isinstance(error, RuntimeError) and _ARCHIVE in str(error):
        return "a write failed"
    return None


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the disk does to a block that writes `path` into an error for people.

    Raises:
        OutputError: if the disk is full, read-only or broken, or forbids it.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if (fault := disk_fault(error)) is None:
            raise
        raise cannot_write(path, fault) from error


def cannot_write(path: str | os.PathLike[str], fault: str) -> OutputError:
    """Return the error for a path that cannot be written."""
    return OutputError(
        f"this cannot be written: {fault}",
        where=str(Path(path)),
        hint="check its parent folder, its permissions and the space left",
    )
