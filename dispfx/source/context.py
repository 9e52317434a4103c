"""The context of a decoder: the number of tokens that it reads, according to its config."""

from typing import Any

from dispfx.source.source import Source

DEMO_CONTEXT = 256
LONGEST_CONTEXT = 2048


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
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 1 else None
