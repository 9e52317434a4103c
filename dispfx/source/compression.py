"""Checkpoints whose weights are compressed: expanded while they are read, or refused.

dispfx cuts plain weights.  transformers can expand some formats when it is asked to; weights of the others
stay packed in modules of their library, which no row or column can be taken out of.
"""

import copy
import inspect
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from dispfx.errors import SourceError

# Its weights are plain, and made ternary in each forward pass.
_PLAIN = ("bitnet",)
# How a format's config is asked for plain weights; the second by versions that lack the first.
_SWITCHES = {"dequantize": True, "run_compressed": False}


def method_of(config: Any) -> str | None:
    """Return the format of a checkpoint's weights, or None where they are plain."""
    section = getattr(config, "quantization_config", None)
    method = section.get("quant_method") if isinstance(section, dict) else None
    return str(method) if method is not None else None


def expanding(config: Any, spec: str) -> Any:
    """Return a config that lets transformers expand the weights; a plain checkpoint's own.

    Raises:
        SourceError: if weights of this format stay packed.
    """
    method = method_of(config)
    if method is None or method in _PLAIN:
        return config
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    names = inspect.signature(known.__init__).parameters if known is not None else ()
    switch = next((name for name in _SWITCHES if name in names), None)
    if switch is None:
        raise SourceError(
            f"the weights are compressed with {method}, and dispfx can only cut plain weights",
            where=spec,
            hint="pass the checkpoint that this one was made from, before it was compressed",
        )
    changed = copy.deepcopy(config)
    changed.quantization_config = {**config.quantization_config, switch: _SWITCHES[switch]}
    return changed
