"""Which code makes a decoder's class known to transformers: its own, a checkpoint's, or the user's."""

from pathlib import Path

from torch import nn
from transformers import CONFIG_MAPPING

from dispfx.errors import DataError
from dispfx.json_text import read_json

# Classes of the last are code of a checkpoint, which transformers loads itself.
_KNOWN = ("transformers", "dispfx", "transformers_modules")


def code_of_class(model: nn.Module) -> str | None:
    """Return the module that defines a decoder's class, or None where transformers finds it by itself."""
    module = type(model).__module__
    return None if module.partition(".")[0] in _KNOWN else module


def require_known_class(folder: Path) -> None:
    """Require that transformers knows the class of a checkpoint, or that its code comes with the checkpoint.

    Raises:
        DataError: where the class is registered by code that was not imported.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return  # whoever reads it says what is wrong
    kind = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(kind, str) and kind not in CONFIG_MAPPING and "auto_map" not in config:
        raise DataError(
            f"transformers must know the decoder's class, and no class is registered for {kind!r}",
            where=str(folder),
            hint="where code of your own registers it, import that in Python before dispfx.load; the "
            "commands do not. Otherwise the decoder needs a newer transformers",
        )
