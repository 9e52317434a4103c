"""Write a file atomically."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dispfx.files.disk import writing


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
