"""Silence the warnings and progress bars of transformers, and shorten its errors to one line."""

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator

from huggingface_hub.utils import enable_progress_bars
from transformers.utils import logging as transformers_logging

from dispfx.source.location import Location

_PIP = re.compile(
    r"pip install (-U |--upgrade )?([A-Za-z][\w.-]*(?![\w+])(?:\[[\w,-]+\])?(?:[<>=!~]=?[\w.]+)?)"
)


@contextlib.contextmanager
def quiet(location: Location) -> Iterator[None]:
    """Silence transformers' warnings and bars inside the block.

    Downloads keep their bar on a terminal.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The bar of GGUF dequantisation ignores all settings.
    hidden = contextlib.redirect_stderr(io.StringIO()) if location.gguf_file else contextlib.nullcontext()
    try:
        if location.hub and sys.stderr.isatty():
            enable_progress_bars()
        with warnings.catch_warnings(), hidden:
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def installation(error: BaseException) -> str | None:
    """Return how to install the package that an error reports as missing, or None."""
    named = _PIP.search(str(error))
    if named:
        return f"pip install {named[1] or ''}'{named[2].rstrip('.')}'"
    return f"install the package {error.name}" if isinstance(error, ImportError) and error.name else None


def short(error: Exception) -> str:
    """Return the message in one line that fits a terminal."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
