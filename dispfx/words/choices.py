"""Look up a choice by name in one table; an unknown name is an error.

    estimator = choice(ESTIMATORS, name, "estimator")

Nothing here imports torch, so that a typo is reported at once.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dispfx.errors import DispfxError

Entry = TypeVar("Entry")


def choice(table: Mapping[str, Entry], name: str, what: str) -> Entry:
    """Return the entry of that name.

    Args:
        what: the argument or option, for the message.

    Raises:
        DispfxError: if the name is unknown, listing the known ones.
    """
    require_choice(table, name, what)
    return table[name]


def require_choice(known: Iterable[str], name: object, what: str) -> None:
    """Raise if a name is unknown.

    Raises:
        DispfxError: listing the known names, with the closest ones as a hint.
    """
    names = list(known)
    if name not in names:
        problem = f"{what} must be {' or '.join(names)}, and {name!r} was given"
        raise DispfxError(problem, hint=closest(str(name), names))


def check_choices(settings: Any) -> None:
    """Raise if a field of a dataclass with a `Literal` type, or a tuple of them, holds another value.

    Raises:
        DispfxError: as `require_choice`.
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        kind, value = hints[field.name], getattr(settings, field.name)
        several = get_origin(kind) is tuple
        kind = get_args(kind)[0] if several else kind
        if get_origin(kind) is Literal:
            for chosen in value if several else [value]:
                require_choice(get_args(kind), chosen, field.name)


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return `did you mean …?` with the known names close to `name`, or None."""
    names = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(name.lower(), names, 3, 0.75)
    return f"did you mean {', '.join(names[entry] for entry in found)}?" if found else None
