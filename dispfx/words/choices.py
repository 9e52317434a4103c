"""Names that a caller chooses: each is looked up in one table, and an unknown one is an error.

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
        DispfxError: if there is none, listing the names that there are.
    """
    require_choice(table, name, what)
    return table[name]


def require_choice(known: Iterable[str], name: object, what: str) -> None:
    """Pass if a name is one of those known.

    Raises:
        DispfxError: listing the known names, with the closest ones as a hint.
    """
    names = list(known)
    if name not in names:
        problem = f"{what} must be {' or '.join(names)}, and {name!r} was given"
        raise DispfxError(problem, hint=closest(str(name), names))


def check_choices(settings: Any) -> None:
    """Pass if every field of a dataclass with a `Literal` type holds one of the values of this type.

    Raises:
        DispfxError: as `require_choice`.
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        if get_origin(hints[field.name]) is Literal:
            value = getattr(settings, field.name)
            require_choice(get_args(hints[field.name]), value, field.name)


def require_fields(kind: type, names: Iterable[str]) -> None:
    """Pass if every name is a field of a dataclass.

    Raises:
        DispfxError: naming the first that is not, and the closest field or all of them.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in known:
            raise DispfxError(
                f"{kind.__name__} has no field {name!r}",
                hint=closest(name, known) or f"the fields are {', '.join(known)}",
            )


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return `did you mean …?` with the known names that are close to `name`, or None."""
    names = {entry.lower(): entry for entry in known}
    found = difflib.get_close_matches(name.lower(), names, 3, 0.75)
    return f"did you mean {', '.join(names[entry] for entry in found)}?" if found else None
