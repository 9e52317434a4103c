"""Compressed checkpoints: expanded on loading, or rejected.

dispfx cuts plain weights.  transformers can expand some formats; in other formats the weights stay packed in
modules of their library, and rows or columns cannot be removed.
"""

import copy
import inspect
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from dispfx.errors import SourceError

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
