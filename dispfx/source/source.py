"""A loaded decoder with its config and tokenizer, and the number of tokens that it reads."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from dispfx.settings.verb_settings import LONGEST_CONTEXT
from dispfx.words.model_origin import Origin


@dataclass(frozen=True, eq=False)
class Source:
    """A decoder in eval mode, with its config and tokenizer.

    Args:
        model: the decoder, from token ids (B, T) to logits (B, T, V) or an output with `.logits`.
        tokenizer: its transformers tokenizer, or None.
        config: its transformers config, or None for a module that transformers does not know.
        name: MODEL as the user wrote it.
        origin: the form of MODEL.
        generation_config: its transformers generation config, or None.
    """

    model: nn.Module
    tokenizer: Any | None
    config: Any | None
    name: str
    origin: Origin
    generation_config: Any | None = None


DEMO_CONTEXT = 256
# What configs call it, of transformers and of code that comes with a checkpoint.
_NAMES_OF_CONTEXT = (
    "max_position_embeddings",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "n_positions",
    "n_ctx",
    "seq_length",
    "context_length",
    "max_target_positions",
    "model_max_length",
)


def context_of(source: Source) -> int:
    """Return the window for perplexity: 2048 tokens, or the decoder's context if shorter."""
    if source.origin == "demo":
        return DEMO_CONTEXT
    return longest_context(source.config)


def longest_context(config: Any) -> int:
    """Return 2048 tokens, or the context in a transformers config if shorter."""
    return min(LONGEST_CONTEXT, named_context(config) or LONGEST_CONTEXT)


def named_context(config: Any) -> int | None:
    """Return the context in a transformers config, or None."""
    found = (getattr(config, name, None) for name in _NAMES_OF_CONTEXT)
    return next((longest for longest in found if type(longest) is int and longest > 1), None)


def beyond_context(config: Any, tokens: int) -> list[str]:
    """Return a note if sequences of so many tokens are longer than the context in a transformers config."""
    named = named_context(config)
    if named is None or tokens <= named:
        return []
    return [
        f"windows of {tokens:,} tokens are longer than the {named:,} that the decoder's config names; "
        "beyond them it may predict worse"
    ]
