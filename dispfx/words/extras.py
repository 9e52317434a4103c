"""Libraries that only some commands need, from `pip install 'dispfx[EXTRA]'`."""

import importlib
from typing import Any

from dispfx.errors import DataError


def library(module: str, extra: str, needed: str, *, where: str | None = None) -> Any:
    """Return a module of an extra.

    Args:
        needed: what needs it, as the beginning of the message; "… cannot be imported" follows.

    Raises:
        DataError: if it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{needed} cannot be imported: {error}", where=where, hint=f"pip install 'dispfx[{extra}]'"
        ) from error
