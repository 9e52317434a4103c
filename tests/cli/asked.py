"""What a replaced function of the API was asked."""

from typing import Any
from unittest.mock import MagicMock

from dispfx.settings.tree import Tree


def asked(twin: MagicMock) -> dict[str, Any]:
    """Return the settings of the last call by their flat names."""
    return flat(twin.call_args.args[0])


def flat(settings: Tree) -> dict[str, Any]:
    """Return every setting of a tree by its flat name."""
    sections = [getattr(settings, name) for name in settings.sections()]
    return {name: getattr(section, name) for section in sections for name in vars(section)}
