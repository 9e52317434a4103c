"""Whether an argument in Python is what a function takes.

Nothing here imports torch.
"""

import os
from pathlib import Path
from typing import Any

from dispfx.errors import DispfxError

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
        raise DispfxError(f"a {wanted.__name__} was expected, but {shown(value)} was given", hint=where_from)


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
    kind = type(value).__name__
    return text if text and len(text) <= _LONGEST else f"{'an' if kind[:1] in 'AEIOUaeiou' else 'a'} {kind}"
