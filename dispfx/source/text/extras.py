"""Libraries for some text formats, from `pip install 'dispfx[data]'`."""

import importlib
from typing import Any

from dispfx.errors import DataError


def library(module: str, *, where: str) -> Any:
    """Return a module of the `data` extra.

    Raises:
        DataError: if it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"{module.partition('.')[0]} is needed to read this text, but it cannot be imported: {error}",
            where=where,
            hint="pip install 'dispfx[data]'",
        ) from error
