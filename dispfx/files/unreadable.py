"""Why a file cannot be read, and what to do: fetched by git without its content, or damaged."""

from pathlib import Path

_LFS = b"version https://git-lfs.github.com/spec/"
NOT_FETCHED = "the file is a git-lfs pointer, and its content was not fetched"


def is_pointer(file: Path) -> bool:
    """Whether a file is what git-lfs puts in the place of one that was not fetched."""
    try:
        if not file.is_file() or file.stat().st_size > 1024:
            return False
        with file.open("rb") as opened:
            return opened.read(len(_LFS)) == _LFS
    except OSError:
        return False  # reading it reports the error


def fetching(file: Path) -> str:
    """Return the command that fetches the content of a pointer."""
    return f"git -C {file.parent} lfs pull"


def reason_and_hint(file: Path, error: Exception) -> tuple[str, str]:
    """Return why a file of a folder that dispfx wrote cannot be read, and what to do about it."""
    if is_pointer(file):
        return NOT_FETCHED, fetching(file)
    return str(error), "copy that file again: it is incomplete, damaged, or of another kind"
