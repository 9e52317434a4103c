"""Size and SHA-256 of a decoder's files: recorded when a folder is written, compared when it is verified.

Digests show that a file is unchanged, on any machine.  For a folder with only one form of the decoder, they
are the only check.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from dispfx.deploy import exported, weights
from dispfx.deploy.section import CONFIG_FILE
from dispfx.errors import DataError

# Without documentation and tokenizers, which users may change.
_ENDINGS = (".safetensors", ".pt2", ".onnx", ".data", ".py")
_NAMES = ("config.json", "model.safetensors.index.json")
_WEIGHTS = "model*.safetensors"


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


def identity(files: Mapping[str, str]) -> str | None:
    """Return what tells a decoder from others, in any folder: one digest of its weights and config.

    Other forms of the decoder, documentation and tokenizers do not count.

    Args:
        files: digests by path, as a report has them.

    Returns:
        A SHA-256 in hexadecimal; None if no file of a decoder is named.
    """
    own = sorted((name, files[name]) for name in _own(files))
    return hashlib.sha256(json.dumps(own).encode()).hexdigest() if own else None


def identity_of(folder: Path, names: Iterable[str] = ()) -> str | None:
    """Return the `identity` of the decoder in a folder, from its files.

    Args:
        names: of the files that belong to the folder; all that it holds by default.
    """
    found = [path.name for path in folder.iterdir() if path.is_file()]
    return identity({name: _digest(folder / name) for name in _own(names or found) if name in found})


def _own(names: Iterable[str]) -> list[str]:
    """Return the names of the files with a decoder's config and weights, or of its graph alone."""
    named = list(names)
    if CONFIG_FILE not in named:
        return [name for name in named if name == exported.PROGRAM_FILE]
    return [name for name in named if name == CONFIG_FILE or ("/" not in name and fnmatch(name, _WEIGHTS))]


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
