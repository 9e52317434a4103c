"""Settings of learning as single options of a run."""

from dataclasses import asdict
from typing import Any

from dispfx.settings import LearnSettings


def options_of(settings: LearnSettings) -> dict[str, Any]:
    """Return every setting that does not adapt to a decoder, by its name."""
    left = {*settings.adaptable, "adaptable"}
    return {name: value for name, value in asdict(settings).items() if name not in left}
