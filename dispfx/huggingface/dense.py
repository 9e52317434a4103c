"""The full-size checkpoint with zeros in the pruned places: for comparison, and for tools that need the
original shapes.  It is an ordinary folder of transformers, which nothing needs dispfx for.
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


def write_dense(
    model: nn.Module, zeroed: Mapping[str, Tensor], folder: Path, *, tokenizer: Any = None
) -> None:
    """Write a decoder with some of its tensors replaced into `folder`; it is not changed.

    Args:
        model: the dense transformers decoder.
        zeroed: full-size tensors with zeros where the plan removes, by path.

    Raises:
        DataError: if the decoder is not one of transformers.
        OutputError: if the folder cannot be written.
    """
    if not isinstance(model, PreTrainedModel):
        raise DataError(
            "a dense checkpoint needs a decoder of transformers",
            where=f"{type(model).__module__}.{type(model).__name__}",
        )
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for path, tensor in zeroed.items():
        owner, _, name = path.rpartition(".")
        twin.get_submodule(owner)._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    twin.tie_weights()
    _forget_format(twin)
    try:
        twin.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise OutputError(f"the dense checkpoint cannot be written: {error}", where=str(folder)) from error


def _forget_format(model: Any) -> None:
    """Take off what says that the weights came from another format: they are plain by now."""
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False
    for entry in (SECTION, LOCK):
        if hasattr(model.config, entry):
            delattr(model.config, entry)
