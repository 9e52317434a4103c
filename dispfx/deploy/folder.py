"""An output folder that appears complete or not at all.

    with new_folder(out) as partial:
        ...                             # write, read back, verify: all inside `partial`
    # only now does `out` exist

The work happens in a sibling, `<out>.partial-<host>-<process>-<random>`, so that the last step is one rename
on one file system.  Any error before it, also an interrupt, removes the sibling.  A killed process leaves the
sibling; the next process that writes the same folder removes it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dispfx.errors import OutputError
from dispfx.files.disk import cannot_write, make_parents, partial_beside, remove_abandoned, writing
from dispfx.words.option_names import option


def refuse_existing(out: str | os.PathLike[str]) -> Path:
    """Return `out` as a path if it does not exist and can be created; call this before any work.

    Raises:
        OutputError: if a file, a folder or a dangling link has that name, or a folder cannot be created.
    """
    path = Path(out)
    _refuse_name(path)
    _require_room(path)
    return path


def _refuse_name(path: Path) -> None:
    if os.path.lexists(path):
        raise OutputError(
            "the output folder must not exist yet",
            where=str(path),
            hint=_other_place(path),
        )


def _other_place(path: Path) -> str:
    """Return the hint for a taken name; it never suggests removing data that dispfx did not write."""
    if _is_written_by_us(path.parent):
        return "move it elsewhere to write it again"
    return f"name another folder with {option('out')}" + (
        ", or remove this one" if _is_written_by_us(path) else ""
    )


def _is_written_by_us(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("plan.safetensors", "report.json"))


def _require_room(path: Path) -> None:
    """Check that a folder can be created at `path`, by creating and removing it."""
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{path.name}.", dir=above))
    except OSError as error:
        raise cannot_write(path, str(error.strerror)) from error


@contextmanager
def new_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an error.

    Everything in it is synced before the rename.

    Raises:
        OutputError: if `out` exists or cannot be written.
    """
    path = Path(out)
    _refuse_name(path)
    partial = partial_beside(path)
    make_parents(path)
    try:
        remove_abandoned(path)
        partial.mkdir()
    except OSError as error:
        raise cannot_write(path, str(error.strerror)) from error
    try:
        with writing(path):
            yield partial
            _publish(partial, path)
    finally:
        # After the rename this name does not exist.
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, path: Path) -> None:
    _refuse_name(path)
    try:
        for folder, _, files in os.walk(partial):
            for name in files:
                _flush(Path(folder, name))
            _flush(Path(folder))
        os.rename(partial, path)
        _flush(path.parent)
    except OSError as error:
        raise cannot_write(path, str(error.strerror)) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
