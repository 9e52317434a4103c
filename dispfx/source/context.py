"""How many tokens a decoder reads, as far as its config says."""

from typing import Any

from dispfx.source.source import Source

DEMO_CONTEXT = 256
LONGEST_CONTEXT = 2048


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
