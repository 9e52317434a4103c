"""What is known about a decoder before it is captured, with the number of tokens that it reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dispfx.words.model_origin import Origin


@dataclass(frozen=True, eq=False)
class Source:
    """A decoder in eval mode and what belongs to it.

    Args:
        model: the decoder, from token ids (B, T) to logits (B, T, V) or an output with `.logits`.
        tokenizer: its transformers tokenizer, or None where there is none.
        config: its transformers config, or None for a module that transformers does not know.
        name: MODEL as the user wrote it.
        origin: which form of MODEL that is.
        generation_config: its transformers generation config, or None.
        tokenizer_files: the tokenizer's own files on disk, to be copied as they are; empty where the
            tokenizer was built from something else (a GGUF file), and is to be saved instead.
    """

    model: nn.Module
    tokenizer: Any | None
    config: Any | None
    name: str
    origin: Origin
    generation_config: Any | None = None
    tokenizer_files: tuple[Path, ...] = ()


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
