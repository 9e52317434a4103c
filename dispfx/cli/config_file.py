"""`--config FILE`: the settings of an earlier run, under those that are given anew.

1. FILE is a report.json, whose `settings` are every setting as that run had it, or a JSON file with such
   sections alone.  None of today's defaults has a part in what they leave open.
2. What is given on the command line wins.
3. A file is data, perhaps from elsewhere.  Where to write is never taken from it, and nor is the permission
   to run code: that of a checkpoint, or a function that MODEL names.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from dispfx.errors import DataError, DispfxError
from dispfx.json_text import read_json
from dispfx.origin import origin_of
from dispfx.settings.field import section_fields
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.trees import RunSettings


def configured(given: dict[str, Any]) -> RunSettings:
    """Return the settings of a run from what was given, over those of `--config` where there is one.

    Raises:
        DispfxError: if MODEL, ratio or output is missing, or the file asks for code to be run.
        DataError: if the file holds no settings.
    """
    path = given.pop("config", None)
    stored = {} if path is None else _stored(Path(path).expanduser())
    flat = {name: value for section in stored.values() for name, value in section.items()}
    _require_named({**flat, **given}, path)
    chosen = given.get("trust_remote_code", False)
    if (
        path is not None
        and not chosen
        and (stored["model"].get("trust_remote_code") or _is_function(flat, given))
    ):
        raise DispfxError(
            "the run of this file executes code that comes with the model",
            where=str({**flat, **given}["model"]),
            hint="read that code, then allow it with --trust-remote-code",
        )
    if not stored:
        return RunSettings.of(**given)
    kept = {name: value for name, value in flat.items() if name in RunSettings.settings()}
    kept = {name: value for name, value in kept.items() if not RunSettings.settings()[name].facts.per_run}
    learning = {one.name: flat[one.name] for one in fields(LearnSettings) if one.name in flat}
    try:
        found = RunSettings.of(**{name: value for name, value in kept.items() if value is not None})
        found = found.fitted(LearnSettings(**learning | {"adaptable": tuple(learning.get("adaptable", ()))}))
    except (TypeError, ValueError) as error:
        raise DataError(f"the settings cannot be used: {error}", where=str(path)) from error
    return found.changed(**given)


def _stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a file of settings, each of whose values has a type that JSON can have."""
    try:
        plain = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"the settings cannot be read: {error}", where=str(path)) from error
    found = plain.get("settings", plain) if isinstance(plain, dict) else None
    known = RunSettings.sections()
    if (
        not isinstance(found, dict)
        or set(found) != set(known)
        or not all(isinstance(section, dict) for section in found.values())
    ):
        raise DataError(
            f"a file of settings has the sections {', '.join(known)}",
            where=str(path),
            hint="pass the report.json of a run that learned",
        )
    return {name: _typed(name, section, path) for name, section in found.items()}


def _typed(section: str, values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values of a section as its fields have them; names that are no setting are refused."""
    kind = RunSettings.sections()[section]
    known = {one.name: one for one in section_fields(kind)}
    extra = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in extra:
            raise DataError(f"{section} has no setting {name!r}", where=str(path))
        if name in known and not known[name].takes(value):
            raise DataError(f"{section}.{name} cannot be {json.dumps(value)[:40]}", where=str(path))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _require_named(given: dict[str, Any], path: object) -> None:
    for name, word in {"model": "MODEL", "ratio": "--ratio", "out": "--out"}.items():
        if given.get(name) is None:
            raise DispfxError(f"{word} is needed" + ("" if path is None else " with this --config"))


def _is_function(flat: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether the file, and not the user, names a function to run."""
    if "model" in given or not isinstance(flat.get("model"), str):
        return False
    try:
        return origin_of(flat["model"]) == "function"
    except DispfxError:
        return False  # whatever it is, the run will say so
