"""Functions that remember their results (`functools.lru_cache`) compute them anew for the time of a trace.

A length that is traced is no number and cannot be looked up; and what a trace computes would be remembered
after it, and is no tensor with values.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def nothing_remembered(module: nn.Module) -> Iterator[None]:
    """Let the cached functions of a module's classes, and of the files of these, compute every result."""
    replaced: list[tuple[Any, str, Any]] = []
    for owner in _owners(module):
        for name, value in list(vars(owner).items()):
            plain = _uncached(value)
            if plain is not None:
                replaced.append((owner, name, value))
                setattr(owner, name, plain)
    try:
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)


def _owners(module: nn.Module) -> list[Any]:
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    files = {kind.__module__ for kind in own}
    return [*own, *(sys.modules[name] for name in files if name in sys.modules)]


def _uncached(value: Any) -> Any:
    """Return what a cached function computes with, or None for anything else."""
    if isinstance(value, staticmethod | classmethod):
        inner = _uncached(value.__func__)
        return None if inner is None else type(value)(inner)
    cached = isinstance(value, functools._lru_cache_wrapper)
    return value.__wrapped__ if cached and value.__wrapped__.__code__.co_argcount else None
