"""The settings of a run as a table to read."""

from collections.abc import Mapping
from typing import Any

from dispfx.settings.field import section_fields
from dispfx.settings.learning_settings import LearnSettings

# The only settings of learning that scores use.
_OF_A_SCORE = ("method", "seq_len", "batch_size", "constrained", "seed")
_LEARNING = [one.name for one in section_fields(LearnSettings) if one.facts.on_command_line]
# Settings of other sections that belong in the table.
_FURTHER = {"budget": ("align", "select"), "text": ("data_bytes", "bos")}


def settings_rows(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return a row of name and value for each setting that the run used.

    Args:
        settings: by section, as in report.json.
    """
    learned = settings["learning"]["method"] == "learned"
    return [
        (name.strip("_").replace("_", " "), _shown(settings[section][name]))
        for section, names in {"learning": _LEARNING if learned else _OF_A_SCORE, **_FURTHER}.items()
        for name in names
        if name in settings[section]
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
