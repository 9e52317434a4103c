"""Files that appear whole or not at all, and what goes wrong with the disk as a message for people.

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


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a name beside `path` to write to; it takes the place of `path` when the block succeeds.

    The bytes reach the disk before they get their name, else a power cut could leave the name on an
    empty file.  The file is as readable as the user's umask says, whoever wrote it.

    Raises:
        OutputError: if the disk is full, read-only or broken, or forbids it.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial{target.suffix}")
    try:
        with writing(target):
            # A link of this name, in a folder from elsewhere, would let the bytes go where it points.
            partial.unlink(missing_ok=True)
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            share(partial)
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def share(path: Path) -> None:
    """Give a file the mode that the user's umask gives new files; safetensors makes them private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
