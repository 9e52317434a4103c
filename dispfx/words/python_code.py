"""Suggest functions for a MODEL that names Python code without a function.

Nothing is imported or run: files are found as Python would find them, and only read.
"""

import ast
import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_MOST_NAMES = 4


def current_folder() -> Path | None:
    """Return the current folder, or None if it was removed or may not be read."""
    try:
        return Path(os.getcwd())
    except OSError:
        return None


def suggestion_for(spec: str) -> str | None:
    """Return how to name the functions of the Python code in `spec`, or None if `spec` is not Python code.

    Args:
        spec: `package.module`, `module.py` or `module.py:function`, as a user wrote it for MODEL.
    """
    place, _, wanted = spec.partition(":")
    name = os.path.normpath(place).removesuffix(".py").replace(os.sep, ".")
    file = _file_of(name)
    functions = None if file is None else _functions(file)
    if file is None or functions is None:
        return None
    current = current_folder()
    here = current is not None and file.is_relative_to(current)
    if not here and (not functions or name.partition(".")[0] in sys.stdlib_module_names):
        return None
    shown = os.path.relpath(file) if here else str(file)
    if not functions:
        return (
            f"{shown} is Python code: write a function without arguments in it, and name it {name}:FUNCTION"
        )
    named = [wanted] if wanted in functions else functions[:_MOST_NAMES]
    return f"{shown} is Python code: name its function, " + " or ".join(f"{name}:{one}" for one in named)


def _file_of(name: str) -> Path | None:
    """Return the source of a module, looked for in the current directory first; no package is imported."""
    # A new file may be missing from the finder's cached listing of the folder.
    importlib.invalidate_caches()
    current = current_folder()
    places: list[str] | None = [*([] if current is None else [str(current)]), *sys.path]
    found = None
    for part in name.split("."):
        # A file finder looks only at the last part of a name, so no parent package is imported.
        found = PathFinder.find_spec(part, places) if part.isidentifier() and places is not None else None
        if found is None:
            return None
        places = found.submodule_search_locations and list(found.submodule_search_locations)
    origin = found and found.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def _functions(file: Path) -> list[str] | None:
    """Return the public functions that can be called without arguments, or None if it is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (
        OSError,
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # the last two: nested too deeply
        return None
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in defined if not node.name.startswith("_") and not _required(node.args)]


def _required(arguments: ast.arguments) -> bool:
    """Whether a call without arguments would fail."""
    by_place = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return by_place > 0 or None in arguments.kw_defaults
