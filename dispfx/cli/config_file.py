"""`--config FILE`: the settings of an earlier run, overridden by the command line.

1. FILE is a report.json, whose `settings` hold every setting of that run, or a JSON file with such sections
   and the settings that somebody chose.  A setting of the file wins over the current default.
2. What is given on the command line wins.
3. Settings of where and how a run executes (`Setting.per_run`) are not taken from the file.
4. The file is untrusted data.  It cannot choose the output path, and it cannot permit code to run: neither
   code of a checkpoint, nor a function that MODEL or a setting names.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dispfx.errors import DataError, DispfxError, UsageError
from dispfx.files.json_text import read_json
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.stored import stored_sections
from dispfx.settings.tree import is_of_a_program
from dispfx.settings.trees import RunSettings
from dispfx.words.model_origin import origin_of
from dispfx.words.own_function import names_function

_NEEDED = {"model": "MODEL", "ratio": "--ratio", "out": "--out"}


def configured(given: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run from the command line, and from `--config` if given.

    Raises:
        DispfxError: if MODEL, ratio or output is missing, or the file asks for code to be run.
        DataError: if the file holds no settings.
    """
    chosen = {name: value for name, value in given.items() if name != "config"}
    if "config" not in given:
        _require_named(chosen, "")
        return RunSettings.of(**chosen)
    # Before the file is read: it never sets the output path.
    _require_named(chosen, " with --config", ("out",))
    stored, of_a_run = _stored(Path(given["config"]).expanduser())
    _require_permission(stored, chosen)
    flat = _kept(stored, chosen)
    _require_named(flat | chosen, " with this --config")
    if not of_a_run:
        named = RunSettings.settings()
        learning = {name: _tuple(one) for name, one in stored["learning"].items() if name in named}
        return RunSettings.of(**(flat | learning | chosen))
    needed = {name: chosen[name] for name in _NEEDED if name in chosen}
    learning = LearnSettings(**{name: _tuple(value) for name, value in stored["learning"].items()})
    return RunSettings.of(**needed, **flat).fitted(learning).changed(**chosen)


def _kept(stored: Mapping[str, dict[str, Any]], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run takes from a file, by flat names.

    Raises:
        DispfxError: if a setting was a Python object, and is not given on the command line.
    """
    kept = {}
    for name, one in RunSettings.settings().items():
        value = next((section[name] for section in stored.values() if name in section), None)
        if value is None or one.facts.per_run or name in chosen:
            continue
        if is_of_a_program(value):
            word = _NEEDED.get(name, one.option)
            raise UsageError(f"{word} is needed with this --config: its run got a Python object")
        kept[name] = _tuple(value)
    return kept


def _stored(path: Path) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the sections of a file of settings, and whether they are all settings of a run."""
    try:
        plain = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"the settings cannot be read: {error}", where=str(path)) from error
    of_a_run = isinstance(plain, dict) and "settings" in plain
    found = plain["settings"] if of_a_run else plain
    try:
        sections = stored_sections(found, strict=True)
    except ValueError as error:
        hint = "pass the report.json of a run that learned"
        raise DataError(f"this is not a settings file: {error}", where=str(path), hint=hint) from error
    if of_a_run:
        return sections, True
    # What the file does not name is left to the recipe, as on the command line.
    return {
        name: {one: section[one] for one in found.get(name, {})} for name, section in sections.items()
    }, False


def _require_named(given: Mapping[str, Any], where: str, names: Iterable[str] = tuple(_NEEDED)) -> None:
    for name in names:
        # Constraints say how much to remove, too.
        if given.get(name) is None and not (name == "ratio" and given.get("constraint")):
            raise UsageError(f"{_NEEDED[name]} is needed{where}", hint="dispfx compile --help")


def _require_permission(stored: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, Any]) -> None:
    """Raise unless the user, not the file, permits the code that MODEL and settings run."""
    if chosen.get("trust_remote_code"):
        return
    model, kept = stored["model"], {name: value for one in stored.values() for name, value in one.items()}
    code = [
        str(kept[name])
        for name, one in RunSettings.settings().items()
        if one.facts.functions and name not in chosen and names_function(kept.get(name))
    ]
    if "model" not in chosen and (model.get("trust_remote_code") or _is_function(model.get("model"))):
        code.insert(0, str(model.get("model")))
    if code:
        raise DispfxError(
            "this file asks to run code that comes with the model, or that a setting names",
            where=", ".join(code),
            hint="read that code, then allow it with --trust-remote-code",
        )


def _is_function(model: Any) -> bool:
    try:
        return isinstance(model, str) and origin_of(model) == "function"
    except DispfxError:
        return False  # the run itself reports the error


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
