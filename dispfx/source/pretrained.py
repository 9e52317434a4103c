"""Folder, GGUF file or hub id → a transformers decoder with its config and tokenizer; or only a config.

transformers initialises missing weights randomly, with a warning.  Here, missing weights and other kinds of
models are errors.

dispfx cuts plain weights.  transformers can expand some compressed formats.  In other formats the weights
stay packed in modules of their library; these are rejected, because rows or columns cannot be removed.
"""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from dispfx.errors import SourceError
from dispfx.files.json_text import read_json
from dispfx.source.location import Location
from dispfx.source.quiet import installation, quiet, short
from dispfx.source.source import Source
from dispfx.source.tokenizer import load_tokenizer
from dispfx.source.transformers_classes import causal_classes, known_config
from dispfx.words.model_origin import Origin
from dispfx.words.option_names import option


def load_pretrained(
    location: Location, spec: str, origin: Origin, dtype: torch.dtype | None, trust_remote_code: bool
) -> Source:
    """Load a causal language model with all weights from the checkpoint.

    Raises:
        SourceError: if files are missing or broken, the architecture is unknown or not a decoder, or a weight
            is not in the checkpoint.
    """
    with quiet(location):
        config = _config(location, spec, trust_remote_code)
        model = _model(location, spec, config, dtype, trust_remote_code)
        tokenizer = load_tokenizer(location, trust_remote_code)
    generation_config = getattr(model, "generation_config", None)
    return Source(model, tokenizer, known_config(model), spec, origin, generation_config)


def build_from_config(
    location: Location, spec: str, origin: Origin, dtype: torch.dtype | None, trust_remote_code: bool
) -> Source:
    """Build the decoder of a config on the meta device, without weights.

    Args:
        location: as for a checkpoint, or the path of the config itself.
        dtype: of the decoder; None means the config's dtype, or float32.

    Raises:
        SourceError: if the config is missing or broken, or its decoder cannot be built.
    """
    with quiet(location):
        config = _config(location, spec, trust_remote_code)
        if method_of(config) == "dispfx":
            raise _pruned(spec)
        own = getattr(config, "dtype", None)
        wanted = dtype or (own if isinstance(own, torch.dtype) else torch.float32)
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=wanted, trust_remote_code=trust_remote_code
                )
        except Exception as error:
            raise SourceError(
                f"the decoder cannot be built from its config: {short(error)}",
                where=spec,
                hint="sizes in config.json may not fit each other",
            ) from error
    return Source(model.eval(), None, model.config, spec, origin, getattr(model, "generation_config", None))


def _config(location: Location, spec: str, trust_remote_code: bool) -> Any:
    raw = _raw_config(location, spec)
    own_code = raw.get("auto_map") or {}
    try:
        config = AutoConfig.from_pretrained(
            location.path, trust_remote_code=trust_remote_code, **location.options
        )
    except Exception as error:
        if own_code and not trust_remote_code:
            raise _needs_own_code(f"the architecture {raw.get('model_type')!r}", spec) from error
        raise SourceError(
            f"config.json cannot be used: {short(error)}", where=spec, hint=installation(error)
        ) from error
    if "AutoModelForCausalLM" in own_code:
        named = list(getattr(config, "architectures", None) or ["its class"])
        if trust_remote_code:
            return config
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not causal_classes().intersection(named):
            raise _needs_own_code(named[0], spec)
    _check_decoder(config, spec)
    return config


def _needs_own_code(what: str, spec: str) -> SourceError:
    return SourceError(
        f"{what} needs code that comes with the checkpoint",
        where=spec,
        hint=f"read that code, then allow it with {option('trust_remote_code', True)}",
    )


def _pruned(spec: str) -> SourceError:
    path = Path(spec).expanduser()
    plan = (path if path.is_dir() else path.parent) / "plan.safetensors"
    shown = f"; its plan is shown by dispfx inspect {plan}" if plan.is_file() else ""
    return SourceError(
        "the config is that of a decoder that dispfx has already pruned",
        where=spec,
        hint=f"pass the config of the decoder that it was made from{shown}",
    )


def _raw_config(location: Location, spec: str) -> dict[str, Any]:
    if location.gguf_file:
        return {}
    if not location.hub:
        try:
            path = Path(location.path).expanduser()
            file = path / "config.json" if path.is_dir() else path
            raw = read_json(file)
        except (OSError, ValueError) as error:
            raise SourceError(f"config.json is not readable JSON: {error}", where=spec) from error
        if not isinstance(raw, dict):
            raise SourceError("config.json must hold an object", where=spec)
        return raw
    try:
        return PretrainedConfig.get_config_dict(location.path, **location.options)[0]
    except Exception as error:
        raise SourceError(
            f"config.json cannot be loaded: {short(error)}",
            where=spec,
            hint="a transformers checkpoint has one; repositories with only adapters or GGUF files do not",
        ) from error


def _check_decoder(config: Any, spec: str) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SourceError(
            f"transformers has no causal language model of type {config.model_type!r}{_kind(config)}",
            where=spec,
            hint="pass a decoder that reads and predicts only text; other models cannot be compiled",
        )
    named = list(getattr(config, "architectures", None) or [])
    if named and not causal_classes().intersection(named):
        raise SourceError(
            f"its config names {named[0]}, which is not a causal language model",
            where=spec,
            hint="encoders, encoder-decoders and models without a language-model head cannot be compiled",
        )


def _kind(config: Any) -> str:
    """Describe the model of a config that is not a decoder's, as the end of a sentence."""
    if getattr(config, "is_encoder_decoder", False):
        return ": it is an encoder-decoder"
    kinds = {
        "it also reads images": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "it is an encoder": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    return next((f": {kind}" for kind, names in kinds.items() if config.model_type in names), "")


def _model(
    location: Location, spec: str, config: Any, dtype: torch.dtype | None, trust_remote_code: bool
) -> Any:
    # Quantised GGUF weights have no dtype; float32 represents them exactly.
    kept = torch.float32 if location.gguf_file else "auto"
    options = {"config": expanding(config, spec)} if not location.gguf_file else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            location.path,
            dtype=dtype or kept,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **options,
            **location.options,
        )
    except Exception as error:
        raise SourceError(
            f"the weights cannot be loaded: {short(error)}",
            where=spec,
            hint=installation(error) or "the checkpoint must contain all weight files, undamaged",
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise SourceError(
            f"{len(missing)} weight(s) are not in the checkpoint and would be random: {shown}",
            where=spec,
            hint="a decoder with a language-model head and all its weights is needed",
        )
    return model


# Its weights are plain, and made ternary in each forward pass.
_PLAIN = ("bitnet",)
# Attribute that requests plain weights; the second one is for older versions.
_SWITCHES = {"dequantize": True, "run_compressed": False}


def method_of(config: Any) -> str | None:
    """Return the format of a checkpoint's weights, or None if they are plain."""
    section = getattr(config, "quantization_config", None)
    method = section.get("quant_method") if isinstance(section, dict) else None
    return str(method) if method is not None else None


def expanding(config: Any, spec: str) -> Any:
    """Return a config that makes transformers expand the weights; unchanged for a plain checkpoint.

    Raises:
        SourceError: if weights of this format stay packed.
    """
    method = method_of(config)
    if method is None or method in _PLAIN:
        return config
    if method == "dispfx":
        raise SourceError(
            "the folder holds a pruned decoder, but not its plan.safetensors",
            where=spec,
            hint="copy plan.safetensors from the folder that this one was made from",
        )
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    names = inspect.signature(known.__init__).parameters if known is not None else ()
    switch = next((name for name in _SWITCHES if name in names), None)
    if switch is None:
        raise SourceError(
            f"the weights are compressed with {method}, but dispfx can only cut plain weights",
            where=spec,
            hint="pass the checkpoint that this one was made from, before it was compressed",
        )
    changed = copy.deepcopy(config)
    changed.quantization_config = {**config.quantization_config, switch: _SWITCHES[switch]}
    return changed
