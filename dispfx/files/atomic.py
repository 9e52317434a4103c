"""A file that appears whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dispfx.files.disk import writing


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
