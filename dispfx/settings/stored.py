"""Read the settings of a run back from a file, and check them.

    report.json: "settings": {"model": {…}, "text": {…}, …}

1. A file has the sections of `RunSettings`, and no other.
2. Values have the types, choices and ranges of their fields.  A module or tensor that a program gave is only
   named (`is_of_a_program`).
3. A setting, or a section, that a file lacks has its default: the run is older than the setting.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dispfx.errors import DispfxError
from dispfx.settings.field import section_fields
from dispfx.settings.tree import is_of_a_program, plain_section
from dispfx.settings.trees import RunSettings


def stored_sections(plain: Any, *, strict: bool) -> dict[str, dict[str, Any]]:
    """Return every setting by section and name, as `RunSettings.plain` does.

    Args:
        strict: reject unknown names; otherwise they are taken as settings of a later version.

    Raises:
        ValueError: with the place of the error.
    """
    known = RunSettings.sections()
    if not isinstance(plain, dict):
        raise ValueError(f"settings must be an object and is {_short(plain)}")
    needed = {name for name, kind in known.items() if any(one.required for one in section_fields(kind))}
    if not needed <= set(plain) <= set(known):
        raise ValueError(f"settings must have the sections {', '.join(known)}, and has {', '.join(plain)}")
    return {name: _section(name, kind, plain.get(name, {}), strict) for name, kind in known.items()}


def _section(name: str, kind: Any, plain: Any, strict: bool) -> dict[str, Any]:
    at = f"settings.{name}"
    if not isinstance(plain, dict):
        raise ValueError(f"{at} must be an object and is {_short(plain)}")
    names = [one.name for one in fields(kind)]
    for unknown in plain.keys() - set(names) if strict else ():
        raise ValueError(f"{at} has no setting {unknown!r}")
    values = {one: plain[one] for one in names if one in plain}
    _check_types(at, kind, values)
    try:
        found = kind(**{one: _tuple(value) for one, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{at}: {error}") from error
    except DispfxError as error:
        raise ValueError(f"{at}: {error.problem}") from error
    return plain_section(found)


def _check_types(at: str, kind: Any, values: Mapping[str, Any]) -> None:
    adaptable = values.get("adaptable", [])
    if not isinstance(adaptable, list) or not all(isinstance(name, str) for name in adaptable):
        raise ValueError(f"{at}.adaptable must be a list of str and is {_short(adaptable)}")
    for one in section_fields(kind):
        if one.required and one.name not in values:
            raise ValueError(f"{at}.{one.name} is missing")
        if one.name not in values or one.takes(values[one.name]) or is_of_a_program(values[one.name]):
            continue
        raise ValueError(f"{at}.{one.name} must be {one.kind_name} and is {_short(values[one.name])}")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _short(value: Any) -> str:
    return json.dumps(value)[:40]
