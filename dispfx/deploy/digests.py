"""Size and SHA-256 of a decoder's files: recorded when a folder is written, compared when it is verified.

Digests show that a file is unchanged, on any machine.  For a folder with only one form of the decoder, they
are the only check.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dispfx.deploy import exported, weights
from dispfx.deploy.section import CONFIG_FILE
from dispfx.errors import DataError

# Without documentation and tokenizers, which users may change.
_ENDINGS = (".safetensors", ".pt2", ".onnx", ".data", ".py")
_NAMES = ("config.json", "model.safetensors.index.json")


def digests(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return the digest of every file of the decoder in `folder`, by its path from there, sorted.

    Args:
        pattern: of the files' names.
    """
    files = [
        path
        for path in folder.rglob(pattern)
        if (path.suffix in _ENDINGS or path.name in _NAMES) and path.is_file()
    ]
    return {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(files)}


def changed(folder: Path, recorded: Mapping[str, str]) -> list[str]:
    """Return the recorded files that are missing in `folder`, or have changed.

    Raises:
        DataError: if a name leads out of the folder.
    """
    for name in recorded:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise DataError("the report names a file outside of its folder", where=f"{folder}: {name!r}")
    return [name for name, digest in recorded.items() if not _is(folder / name, digest)]


def _is(path: Path, digest: str) -> bool:
    try:
        return path.is_file() and _digest(path) == digest
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored_size(folder: Path) -> tuple[int, int]:
    """Return parameters and bytes of the weight files, or of `program.pt2` where that is all there is.

    Raises:
        DataError: if a file is missing or damaged.
    """
    if (folder / CONFIG_FILE).is_file():
        return weights.count_parameters(folder), weights.count_bytes(folder)
    return exported.count_parameters(folder), (folder / exported.PROGRAM_FILE).stat().st_size
