"""Write files atomically, and turn disk errors into messages with the path and a remedy.

Libraries report them differently: Python as an OSError, safetensors as the text "I/O error: … (os error 28)",
and torch's archives without a number.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dispfx.errors import OutputError

# Errors of the disk, among all errors of the system.
_NUMBERS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM,
)  # fmt: skip
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_ARCHIVE = "PytorchStreamWriter failed writing"


def disk_fault(error: BaseException) -> str | None:
    """Return the description of a disk error, or None for other errors."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _NUMBERS else None
    if isinstance(error, SafetensorError) and (number := _NUMBERED.search(str(error))):
        return os.strerror(int(number[1])) if int(number[1]) in _NUMBERS else None
    if isinstance(error, RuntimeError) and _ARCHIVE in str(error):
        return "a write failed"
    return None


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert disk errors of a block that writes `path`.

    Raises:
        OutputError: if the disk is full, read-only or broken, or permission is denied.
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
    """Yield a temporary path in the same folder; it replaces `path` if the block succeeds.

    The bytes are synced before the rename, otherwise a power failure could leave an empty file under the
    final name.  The file's mode follows the user's umask.

    Raises:
        OutputError: if the disk is full, read-only or broken, or permission is denied.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial{target.suffix}")
    try:
        with writing(target):
            # A symbolic link of this name in an untrusted folder could redirect the output.
            partial.unlink(missing_ok=True)
            yield partial
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            share(partial)
            os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def share(path: Path) -> None:
    """Set the mode that the user's umask gives new files, because safetensors makes them private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
