"""What a command starts from: the decoder, and how much of a text it reads."""

from typing import Any

from torch import nn

from dispfx.chosen_device import chosen_device
from dispfx.huggingface.classes import known_config
from dispfx.settings import ModelSettings
from dispfx.source import Source, load_source

DEMO_CONTEXT = 256
LONGEST_CONTEXT = 2048


def open_model(settings: ModelSettings) -> Source:
    """Return MODEL as a `Source`; a module is taken as it is.

    Raises:
        DispfxError: if the device is not available.
        SourceError: if MODEL is no decoder, or does not exist.
    """
    device = chosen_device(settings.device)
    if isinstance(settings.model, nn.Module):
        return _source_of(settings.model)
    return load_source(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        device=device,
        trust_remote_code=settings.trust_remote_code,
        tokenizer=settings.tokenizer,
    )


def _source_of(model: nn.Module) -> Source:
    return Source(
        model=model,
        tokenizer=None,
        config=known_config(model),
        name=type(model).__name__,
        origin="function",
        generation_config=getattr(model, "generation_config", None),
    )


def context_of(source: Source) -> int:
    """Return the window that perplexity is measured with: 2048 tokens, or what the decoder can read."""
    if source.origin == "demo":
        return DEMO_CONTEXT
    return longest_context(source.config)


def longest_context(config: Any) -> int:
    """Return 2048 tokens, or what a transformers config says that the decoder can read."""
    return min(LONGEST_CONTEXT, named_context(config) or LONGEST_CONTEXT)


def named_context(config: Any) -> int | None:
    """Return how many tokens a transformers config says that the decoder can read, or None."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None
