"""User functions in place of a choice: `mine.py:score`, or in Python the function itself.

    entry = own_or_choice(SCORES, value, "method")      the table's entry, or an `OwnFunction`

Pass only values that the user gave in this run: naming a file runs it.  Values from a report, a plan or a
settings file need the user's permission first (`names_function`).
"""

import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dispfx.errors import DispfxError, SourceError
from dispfx.words.choices import choice, closest
from dispfx.words.imported_files import imported_files

Entry = TypeVar("Entry")
_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
_IDENTITY = re.compile(r".+ \([0-9a-f]{16}\)")


@dataclass(frozen=True)
class OwnFunction:
    """A user's function.

    Args:
        name: as the user names it: `mine.py:score`, or its module and name.
        digest: of the file and of what it imports from its folder, or of the function's source.
    """

    name: str
    digest: str
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function.

        Raises:
            SourceError: with the line in the user's code, if it raises anything but a `DispfxError`.
        """
        try:
            return self.function(*args)
        except DispfxError:
            raise
        except (Exception, SystemExit) as error:
            raise SourceError(
                f"{self.name} raised {type(error).__name__}: {error}",
                where=_line_of(error) or _place_of(self.function),
            ) from error


def names_function(value: object) -> bool:
    """Whether a setting's value is a user's function, or names one."""
    return callable(value) or (isinstance(value, str) and _SPEC.fullmatch(value) is not None)


def own_or_choice(table: Mapping[str, Entry], value: Any, what: str) -> Entry | OwnFunction:
    """Return a user function, or the entry of a table.

    Raises:
        DispfxError: if the entry is unknown.
        SourceError: if the file or the function cannot be loaded.
    """
    return own_function(value) if names_function(value) else choice(table, value, what)


def own_function(value: Any) -> OwnFunction:
    """Return the function that `file.py:function` names, or a Python function, with its digest.

    A file runs once until it changes, or a module that it imports from its own folder.

    Raises:
        SourceError: if there is no such file or function, or the file raises.
    """
    if callable(value):
        return OwnFunction(_name_of(value), _digest(_source_of(value)), value)
    found = _SPEC.fullmatch(value)
    assert found is not None
    path = Path(found["file"]).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SourceError(f"the file of {value} cannot be read: {error.strerror}", where=str(path)) from error
    whole = path.resolve()
    neighbours = tuple(sorted(imported_files(whole, content).items()))
    digests = tuple((name, _digest(other.read_bytes())) for name, other in neighbours)
    digest = _digest(repr((content, digests)).encode()) if neighbours else _digest(content)
    module = _module(whole, content, digest, digests)
    function = getattr(module, found["name"], None)
    if not callable(function):
        known = [name for name, entry in vars(module).items() if inspect.isfunction(entry)]
        raise SourceError(
            f"{path} has no function {found['name']}",
            where=str(path),
            hint=closest(found["name"], known) or f"its functions are {', '.join(known) or 'none'}",
        )
    return OwnFunction(value, digest, function)


def require_functions(*values: object) -> None:
    """Load the functions among some values, so that errors in them are reported before the work.

    Raises:
        SourceError: as `own_function`.
    """
    for value in values:
        if names_function(value):
            own_function(value)


def shown(value: object) -> str:
    """Return a setting's value as shown in messages."""
    return _name_of(value) if callable(value) else str(value)


def identity_of(value: Any) -> Any:
    """Return what a file stores for a setting: its value, or the name and digest of a user function."""
    if not names_function(value):
        return value
    found = own_function(value)
    return f"{found.name} ({found.digest})"


def is_identity(value: object) -> bool:
    """Whether a text is what a file holds of a user's function (`identity_of`)."""
    return isinstance(value, str) and _IDENTITY.fullmatch(value) is not None


@cache
def _module(path: Path, content: bytes, digest: str, neighbours: tuple[tuple[str, str], ...]) -> ModuleType:
    """Run a file's content as a module.

    Python's cached bytecode of the file is not used: it identifies a file by modification second and size.

    Args:
        digest: of the file and the modules of its folder.
        neighbours: their names and digests.  Every file gets its own: they are imported for it alone.
    """
    module = ModuleType(f"_own_{path.stem}_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent))
    # A module of that name from elsewhere stays what it is for the rest of the process.
    elsewhere = {name: sys.modules.pop(name) for name, _ in neighbours if name in sys.modules}
    invalidate_caches()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        exec(compile(content, str(path), "exec"), vars(module))  # noqa: S102
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise SourceError(
            f"{path.name} cannot be run: {type(error).__name__}: {error}",
            where=_line_of(error) or str(path),
        ) from error
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(str(path.parent))
        for name, _ in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update(elsewhere)
    return module


def _name_of(function: Any) -> str:
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_of(function: Any) -> bytes:
    try:
        return inspect.getsource(inspect.unwrap(function)).encode()
    except (OSError, TypeError):  # typed into an interpreter, or an object
        code = getattr(function, "__code__", None)
        return _name_of(function).encode() if code is None else code.co_code + repr(code.co_consts).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _place_of(function: Any) -> str | None:
    """Return the first line of a function, or of an object's class; None where it has no file."""
    found = function if hasattr(function, "__code__") or isinstance(function, type) else type(function)
    try:
        return f"{inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}"
    except (OSError, TypeError):
        return None


def _line_of(error: BaseException) -> str | None:
    """Return the last line of the user's code, not of a library, that ran before an error; or None."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = [
        frame
        for frame in frames
        if frame.filename != __file__
        and "site-packages" not in frame.filename
        and not frame.filename.startswith("<frozen")
    ]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
