"""Whether an argument in Python is what a function takes.

Nothing here imports torch.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dispfx.errors import DispfxError
from dispfx.words.option_names import option

_LONGEST = 60


def require_given(value: Any, wanted: type, where_from: str) -> None:
    """Raise unless a value is of a class.

    Args:
        wanted: the class.
        where_from: what returns such a value, for the hint.

    Raises:
        DispfxError: with what was given.
    """
    if not isinstance(value, wanted):
        raise DispfxError(
            f"{_with_article(wanted.__name__)} was expected, but {shown(value)} was given", hint=where_from
        )


def whole_number_given(value: Any, least: int, name: str) -> None:
    """Raise unless a value is a whole number of at least `least`.

    Raises:
        DispfxError: with what was given.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DispfxError(
            f"a whole number of {least} or more was expected for {option(name)}, but {shown(value)} was given"
        )


def names_given(value: Any, name: str) -> tuple[str, ...]:
    """Return names that were given as one string or several.

    Raises:
        DispfxError: if they are neither.
    """
    if isinstance(value, str):
        return (value,)
    names = tuple(value) if isinstance(value, Iterable) else None
    if names is None or not all(isinstance(one, str) for one in names):
        raise DispfxError(
            f"a name or a list of names was expected for {option(name)}, but {shown(value)} was given"
        )
    return names


def path_given(value: Any, what: str) -> Path:
    """Return a path that was given as a string or a path.

    Args:
        what: it names, with its article, for messages.

    Raises:
        DispfxError: if it is neither, or empty, which would be the current folder.
    """
    if not isinstance(value, str | os.PathLike):
        raise DispfxError(f"the path of {what} was expected, but {shown(value)} was given")
    if not os.fspath(value):
        raise DispfxError(f"the path of {what} was expected, but an empty one was given")
    return Path(value).expanduser()


def shown(value: Any) -> str:
    """Return a value in a few words: itself if it is short, and its class otherwise."""
    text = repr(value) if isinstance(value, str | int | float | os.PathLike | None) else ""
    return text if text and len(text) <= _LONGEST else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
