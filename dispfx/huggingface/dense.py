"""Ordinary transformers folders, which need no dispfx.

One is the full-size checkpoint with zeros in the pruned places: for comparison, and for tools that need the
original shapes.  `dispfx.huggingface.ordinary` makes the other kind, a smaller decoder.
"""

import copy
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from dispfx.errors import DataError, OutputError
from dispfx.huggingface.entries import LOCK, SECTION
from dispfx.source.location import Location
from dispfx.source.own_code import carry_code
from dispfx.source.quiet import quiet


def zeroed_twin(model: nn.Module, zeroed: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return a decoder with some tensors replaced; `model` is not changed, and other tensors are shared.

    Args:
        model: the dense transformers decoder.
        zeroed: full-size tensors with zeros where the plan removes, by path.

    Raises:
        DataError: if the decoder is not one of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise DataError(
            "a dense checkpoint needs a decoder of transformers",
            where=f"{type(model).__module__}.{type(model).__name__}",
        )
    tensors = chain(model.parameters(), model.buffers())
    twin: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for path, tensor in zeroed.items():
        owner, _, name = path.rpartition(".")
        twin.get_submodule(owner)._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    twin.tie_weights()
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(twin, name):
            delattr(twin, name)
    twin.is_quantized = False
    forget_format(twin.config)
    return twin


def write_ordinary(model: PreTrainedModel, folder: Path, *, tokenizer: Any = None) -> None:
    """Write a decoder of transformers into `folder` as it is.

    Raises:
        OutputError: if the folder cannot be written.
    """
    try:
        with quiet(Location(str(folder))):
            model.save_pretrained(folder)
        carry_code(folder, {"AutoConfig": model.config, "AutoModelForCausalLM": model})
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise OutputError(f"the dense checkpoint cannot be written: {error}", where=str(folder)) from error


def forget_format(config: Any) -> Any:
    """Take off what says that the weights came from another format: they are plain by now."""
    for entry in (SECTION, LOCK):
        if hasattr(config, entry):
            delattr(config, entry)
    return config
