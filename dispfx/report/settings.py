"""The settings of a run: as a table to read, and as the options of a command line that gives it again."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dispfx.report.schema import Settings

# What no option sets: names of settings that may give way, and how often something is noted.
_WITHOUT_OPTION = ("adaptable", "log_every", "held_out_every")
# All that a score looks at.
_OF_A_SCORE = (
    "method", "seq_len", "batch_size", "seed", "constrained", "align", "select", "data_bytes", "bos",
)  # fmt: skip


def settings_rows(settings: Settings) -> list[tuple[str, str]]:
    """Return a row of name and value for each setting that had a part in the run."""
    learned = settings.learning.method == "learned"
    return [
        (name.strip("_").replace("_", " "), _shown(value))
        for name, value in _values(settings)
        if learned or name in _OF_A_SCORE
    ]


def settings_words(settings: Settings) -> dict[str, str]:
    """Return one word of a command line for each setting, by the name of its option.

    Together they leave nothing to defaults.  `--recipe paper`, which has the values of `LearnSettings`, is
    for settings that a later version may have and this run had not.
    """
    words = {"--recipe": "--recipe=paper"}
    for name, value in _values(settings):
        option = f"--{name.strip('_').replace('_', '-')}"
        if not isinstance(value, bool):
            words[option] = f"{option}={value}"
        elif name == "antithetic":
            words[option] = option if value else "--no-antithetic"
        elif value:
            words[option] = option
    return words


def _values(settings: Settings) -> Iterator[tuple[str, Any]]:
    for name, value in asdict(settings.learning).items():
        if name not in _WITHOUT_OPTION:
            yield name, value
    yield from ((name, getattr(settings, name)) for name in ("align", "select", "data_bytes", "bos"))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
