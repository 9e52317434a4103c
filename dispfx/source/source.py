"""A loaded decoder with its config and tokenizer, and the number of tokens that it reads."""

import json
import re
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


# Entries of configs that say nothing of what a decoder computes, or that a written folder has for itself.
_NO_ARITHMETIC = re.compile(
    r"_.*|.*_token_id|.*dtype|architectures|auto_map|transformers_.*|quantization_config|use_cache|"
    r"output_.*|return_dict|tie_.*|id2label|label2id|chunk_size_feed_forward|task_specific_params"
)


def other_entry(config: Any, dense: Any) -> str | None:
    """Return the first entry in which the transformers configs of two decoders differ; None without one.

    An entry that one of them lacks, and what changes no arithmetic, is left out.
    """
    if config is None or dense is None:
        return None
    ours, theirs = (
        {name: json.dumps(value, sort_keys=True, default=str) for name, value in one.to_dict().items()}
        for one in (config, dense)
    )
    shared = [name for name in ours if name in theirs and not _NO_ARITHMETIC.fullmatch(name)]
    return next((name for name in shared if ours[name] != theirs[name]), None)


def beyond_context(config: Any, tokens: int) -> list[str]:
    """Return a note if sequences of so many tokens are longer than the context in a transformers config."""
    named = named_context(config)
    if named is None or tokens <= named:
        return []
    return [
        f"windows of {tokens:,} tokens are longer than the {named:,} that the decoder's config names; "
        "beyond them it may predict worse"
    ]
