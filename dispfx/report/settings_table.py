"""The settings of a run as a table to read."""

from collections.abc import Mapping
from typing import Any

# The only settings that scores use.
_OF_A_SCORE = (
    "method", "seq_len", "batch_size", "seed", "constrained", "align", "select", "data_bytes", "bos",
)  # fmt: skip
_LEFT_OUT = ("adaptable", "log_every", "held_out_every")
# Single settings of other sections that belong in the table.
_ROWS = {"learning": None, "budget": ("align", "select"), "text": ("data_bytes", "bos")}


def settings_rows(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return a row of name and value for each setting that the run used.

    Args:
        settings: by section, as in report.json.
    """
    learned = settings["learning"]["method"] == "learned"
    return [
        (name.strip("_").replace("_", " "), _shown(value))
        for section, names in _ROWS.items()
        for name, value in settings[section].items()
        if name not in _LEFT_OUT and (names is None or name in names) and (learned or name in _OF_A_SCORE)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
