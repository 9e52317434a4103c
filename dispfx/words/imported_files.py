"""Which files of its folder a Python file imports, directly or through each other.

    mine.py: import rates          →  {rates: rates.py, tables: tables/__init__.py}
    rates.py: from tables import T

The code is read and not run, so imports inside functions count too.  Nothing here imports torch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

# A file may stand next to a copy of dispfx, which is no part of a user's function.
_OURS = "dispfx"


def imported_files(file: Path, content: bytes) -> dict[str, Path]:
    """Return the modules that a file imports from its own folder, by their full names.

    Args:
        file: its path; the name of a module begins at its folder.
        content: what the file holds.
    """
    found: dict[str, Path] = {}
    waiting = list(_names(content, ()))
    while waiting:
        name = waiting.pop()
        path = _file_of(file.parent, name)
        if path is None or name in found or path == file or name.partition(".")[0] == _OURS:
            continue
        found[name] = path
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        waiting += _names(_read(path), tuple(package))
    return found


def _names(content: bytes, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the full names of modules that some code may import, and of the packages that hold them."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # The message is that of running it.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield from _with_packages(one.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = list(package[: len(package) - node.level + 1]) if node.level else []
            module = [*above, *(node.module or "").split(".")] if node.module else above
            yield from _with_packages(module)
            for one in node.names:
                yield ".".join([*module, one.name])


def _with_packages(parts: list[str]) -> Iterator[str]:
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _file_of(folder: Path, name: str) -> Path | None:
    place = folder.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in files if path.is_file()), None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
