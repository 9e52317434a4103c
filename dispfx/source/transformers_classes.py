"""The code that registers a decoder's class: transformers itself, a checkpoint, or the user."""

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from dispfx.errors import DataError, OutputError
from dispfx.files.json_text import read_json
from dispfx.source.own_code import is_own_code
from dispfx.words.option_names import option

# Classes in `transformers_modules` are code of a checkpoint, which transformers loads.
_KNOWN = ("transformers", "dispfx", "transformers_modules")


def code_of_class(model: nn.Module) -> str | None:
    """Return the module that defines a decoder's class, or None if transformers finds it."""
    module = type(model).__module__
    return None if module.partition(".")[0] in _KNOWN else module


def unknown_class(model: nn.Module) -> str | None:
    """Return the reason why transformers would not build this class from its config, or None.

    None also if the decoder has no transformers config.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type") or is_own_code(model):
        return None
    own, kind = type(model), type(config)
    if not isinstance(model, PreTrainedModel):
        return f"{own.__name__} has a transformers config but is not a PreTrainedModel"
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"no class is registered with AutoModelForCausalLM for {kind.__name__}"
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    built = found if isinstance(found, tuple) else (found,)
    return None if own in built else f"from its config it would build {built[0].__name__}, not {own.__name__}"


def known_config(model: nn.Module) -> Any | None:
    """Return the transformers config of a decoder, or None."""
    config = getattr(model, "config", None)
    return config if hasattr(config, "model_type") and unknown_class(model) is None else None


def require_known_class(folder: Path, trust_remote_code: bool = False) -> None:
    """Require that transformers knows the class of a checkpoint, or may run its code.

    Raises:
        DataError: where the class is code of the folder, which may not run, or is registered by code that was
            not imported.
    """
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return  # reading it reports the error
    if not isinstance(config, dict):
        return
    kind, files = config.get("model_type"), code_files(config.get("auto_map"))
    unknown = isinstance(kind, str) and kind not in CONFIG_MAPPING
    # Where transformers has a class of its own, a name without a file is a remainder.
    own_code = bool(files) and (unknown or any((folder / file).is_file() for file in files))
    if own_code and not trust_remote_code:
        raise DataError(
            f"the decoder's class is code that comes with the folder: {', '.join(files)}",
            where=str(folder),
            hint=f"read that code, then allow it with {option('trust_remote_code', True)}",
        )
    if unknown and not own_code:
        raise DataError(
            f"transformers must know the decoder's class, but no class is registered for {kind!r}",
            where=str(folder),
            hint="if your code registers it, import that code in Python before dispfx.load (commands do "
            "not). Otherwise the decoder needs a newer transformers",
        )


def code_files(auto_map: Any) -> list[str]:
    """Return the files that an `auto_map` names."""
    references = auto_map.values() if isinstance(auto_map, dict) else ()
    return sorted({f"{str(one).partition('.')[0]}.py" for one in references})


def causal_classes() -> set[str]:
    """Return the names of the classes that transformers has for decoders with a language-model head."""
    classes: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        classes.update((names,) if isinstance(names, str) else names)
    return classes


def require_head(folder: Path) -> None:
    """Require that transformers saved a decoder into a folder, and not its body, or with another head.

    Raises:
        OutputError: with the class that the config names.
    """
    try:
        named = read_json(folder / "config.json").get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return  # reading it reports the error
    known = [name for name in named if isinstance(name, str) and hasattr(transformers, name)]
    if known and not causal_classes().intersection(named):
        raise OutputError(
            f"the folder holds a {known[0]}, which has no language-model head, and a decoder is needed",
            where=str(folder),
            hint="save what AutoModelForCausalLM.from_pretrained loads from the folder that dispfx wrote; "
            "transformers opens this one",
        )
