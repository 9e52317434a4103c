"""`--config FILE`: the settings of an earlier run, under those that are given anew.

1. FILE is a report.json, whose `settings` are every setting as that run had it, or a JSON file with such
   sections alone.  Today's defaults have no part in a setting that the file has.
2. What is given on the command line wins.
3. Settings that say where and how a run goes (`Setting.per_run`) are not taken from the file.
4. A file is data, perhaps from elsewhere.  It cannot choose where to write, and it cannot permit that code is
   run: neither code of a checkpoint, nor a function that MODEL names.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dispfx.errors import DataError, DispfxError, UsageError
from dispfx.files.json_text import read_json
from dispfx.settings.field import section_fields
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.tree import is_of_a_program
from dispfx.settings.trees import RunSettings
from dispfx.words.model_origin import origin_of

_NEEDED = {"model": "MODEL", "ratio": "--ratio", "out": "--out"}


def configured(given: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run from what was given, over those of `--config` where there is one.

    Raises:
        DispfxError: if MODEL, ratio or output is missing, or the file asks for code to be run.
        DataError: if the file holds no settings.
    """
    chosen = {name: value for name, value in given.items() if name != "config"}
    if "config" not in given:
        _require_named(chosen, "")
        return RunSettings.of(**chosen)
    # Before the file is read, for it never says where to write.
    _require_named(chosen, " with --config", ("out",))
    path = Path(given["config"]).expanduser()
    stored = _stored(path)
    _require_permission(stored["model"], chosen)
    flat = _kept(stored, chosen)
    _require_named(flat | chosen, " with this --config")
    needed = {name: chosen[name] for name in _NEEDED if name in chosen}
    try:
        learning = {**stored["learning"], "adaptable": tuple(stored["learning"].get("adaptable", ()))}
        found = RunSettings.of(**needed, **flat).fitted(LearnSettings(**learning))
    except (TypeError, ValueError) as error:
        raise DataError(f"the settings cannot be used: {error}", where=str(path)) from error
    return found.changed(**chosen)


def _kept(stored: Mapping[str, dict[str, Any]], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run takes from a file, by flat names.

    Raises:
        DispfxError: if something was an object of a program, and is not given anew.
    """
    kept = {}
    for name, one in RunSettings.settings().items():
        value = next((section[name] for section in stored.values() if name in section), None)
        if value is None or one.facts.per_run or name in chosen:
            continue
        if is_of_a_program(value):
            word = _NEEDED.get(name, one.option)
            raise UsageError(f"{word} is needed with this --config: its run was given an object in Python")
        kept[name] = value
    return kept


def _stored(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a file of settings, with values of the types that the settings have."""
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
    kind: Any = RunSettings.sections()[section]
    known = {one.name: one for one in section_fields(kind)}
    names = {one.name for one in fields(kind)}
    for name, value in values.items():
        if name not in names:
            raise DataError(f"{section} has no setting {name!r}", where=str(path))
        if name in known and not known[name].takes(value) and not is_of_a_program(value):
            raise DataError(f"{section}.{name} cannot be {json.dumps(value)[:40]}", where=str(path))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _require_named(given: Mapping[str, Any], where: str, names: Iterable[str] = tuple(_NEEDED)) -> None:
    for name in names:
        if given.get(name) is None:
            raise UsageError(f"{_NEEDED[name]} is needed{where}", hint="dispfx compile --help")


def _require_permission(stored: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """Pass if the user, and not the file, permits the code that MODEL runs."""
    if "model" in chosen or chosen.get("trust_remote_code"):
        return
    if stored.get("trust_remote_code") or _is_function(stored.get("model")):
        raise DispfxError(
            "the run of this file executes code that comes with the model",
            where=str(stored.get("model")),
            hint="read that code, then allow it with --trust-remote-code",
        )


def _is_function(model: Any) -> bool:
    try:
        return isinstance(model, str) and origin_of(model) == "function"
    except DispfxError:
        return False  # whatever it is, the run will say so
