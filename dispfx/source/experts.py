"""How a transformers decoder computes its mixtures of experts.

    grouped    tokens are sorted by expert, and each expert multiplies its run of tokens: efficient for
               learning and long texts
    batched    the weights of every token's experts are gathered and multiplied: plain operations that
               every exporter supports, with too much memory for many tokens

Both read the same parameters, so a plan made with one fits the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from dispfx.words.choices import choice

Experts = Literal["grouped", "batched"]

_NAMES = {"grouped": "grouped_mm", "batched": "batched_mm"}
# Kernels that were chosen at load time stay as they are.
_EXCHANGEABLE = {"eager", None, *_NAMES.values()}


def has_choice_of_experts(model: nn.Module) -> bool:
    """Whether the module is a transformers decoder that supports both implementations of experts."""
    with experts_as(model, "grouped"):
        grouped = _chosen(model)
        with experts_as(model, "batched"):
            return _chosen(model) != grouped


@contextmanager
def experts_as(model: nn.Module, experts: Experts) -> Iterator[None]:
    """Use one implementation of experts inside the block, if the module has a choice.

    Raises:
        DispfxError: if the implementation is unknown.
    """
    before = _chosen(model)
    changed = _change(model, choice(_NAMES, experts, "experts"))
    try:
        yield
    finally:
        if changed:
            assert isinstance(model, PreTrainedModel)
            model.set_experts_implementation(before)


def _change(model: nn.Module, name: str) -> bool:
    """Choose an implementation if the module supports it; return whether it does."""
    if not isinstance(model, PreTrainedModel) or not set(_chosen(model).values()) <= _EXCHANGEABLE:
        return False
    try:
        model.set_experts_implementation(name)
    except ValueError:  # a decoder without experts
        return False
    return True


def _chosen(model: nn.Module) -> dict[str, str | None]:
    """Return the implementation of the module and of each part with its own config."""
    return model.get_experts_implementation() if isinstance(model, PreTrainedModel) else {}
