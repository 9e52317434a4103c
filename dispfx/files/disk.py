"""Write files atomically, and turn disk errors into messages with the path and a remedy.

Libraries report them differently: Python as an OSError, safetensors as the text "I/O error: … (os error 28)",
and torch's archives without a number.
"""

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from safetensors import SafetensorError

from dispfx.errors import OutputError

# Errors of the disk, among all errors of the system.
_NUMBERS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM,
)  # fmt: skip
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_ARCHIVE = "PytorchStreamWriter failed writing"
# Of Linux: the host, and the numbering of processes.  Every container numbers its own.
_MACHINE, _NUMBERING = Path("/etc/machine-id"), Path("/proc/self/ns/pid")


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
    with _published(partial, target, os.replace):
        # A symbolic link of this name in an untrusted folder could redirect the output.
        partial.unlink(missing_ok=True)
        yield partial


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; it becomes `path` if the block succeeds and nothing has that name by then.

    As `replacing`, but a file that appears in the meantime is never overwritten, and two processes that
    write one `path` do not disturb each other.  Missing parent folders are made.

    Raises:
        OutputError: as `replacing`; or if `path` exists at the end, with the name that the new file has now.
    """
    target = Path(path)
    make_parents(target)
    partial = partial_beside(target)
    with _published(partial, target, _add_new):
        remove_abandoned(target)
        yield partial


@contextmanager
def _published(partial: Path, target: Path, publish: Callable[[Path, Path], None]) -> Iterator[None]:
    """Give the file that a block writes to `partial` its final name, or remove it."""
    try:
        with writing(target):
            yield
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            share(partial)
            publish(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _add_new(partial: Path, target: Path) -> None:
    if _named(partial, target):
        return
    number = 2
    while not _named(partial, other := target.with_name(f"{target.stem}-{number}{target.suffix}")):
        number += 1
    raise OutputError(
        "something else appeared under this name while the file was made",
        where=str(target),
        hint=f"nothing is lost: the new file is {other}",
    )


def _named(partial: Path, target: Path) -> bool:
    """Move a file to a name; False if something has that name."""
    try:
        # A rename would overwrite what is there.
        os.link(partial, target)
    except FileExistsError:
        return False
    except OSError as error:
        if disk_fault(error) is not None and error.errno != errno.EPERM:
            raise
        # A file system without links.
        if os.path.lexists(target):
            return False
        os.replace(partial, target)
    return True


def make_parents(path: Path) -> None:
    """Make the folders that a file will stand in.

    Raises:
        OutputError: if one cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, str(error.strerror)) from error


def partial_beside(path: Path) -> Path:
    """Return a temporary name for what becomes `path`; no other process and no other call gets this name."""
    return path.with_name(f"{path.name}.partial-{_visible()}-{os.getpid()}-{secrets.token_hex(4)}")


def remove_abandoned(path: Path) -> None:
    """Remove temporary copies of a file or folder from dead processes, which can be as large as `path`.

    Those of another host or container stay: nobody here can tell whether the process that makes them lives.
    """
    of_processes = re.compile(rf"{re.escape(path.name)}\.partial-{_visible()}-(\d+)-[0-9a-f]{{8}}")
    for sibling in path.parent.iterdir():
        name = of_processes.fullmatch(sibling.name)
        if not name or _is_running(int(name[1])):
            continue
        if sibling.is_dir() and not sibling.is_symlink():
            shutil.rmtree(sibling, ignore_errors=True)
        else:
            sibling.unlink(missing_ok=True)


@cache
def _visible() -> str:
    """Return a name for the processes that have numbers here: those of this host, or of this container."""
    facts = [platform.node()]
    with suppress(OSError):
        facts.append(_MACHINE.read_text(encoding="ascii"))
    with suppress(OSError):
        facts.append(str(_NUMBERING.stat().st_ino))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # a process of another user
    return True


def share(path: Path) -> None:
    """Set the mode that the user's umask gives new files, because safetensors makes them private."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
