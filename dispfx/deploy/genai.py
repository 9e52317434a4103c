"""genai_config.json: what onnxruntime-genai needs to know about a model with a cache.

It is written from the model's own inputs and outputs; the decoder's config gives only what the graph
does not hold (special tokens, the longest context).  `decoder` is genai's name for any decoder whose
inputs and outputs are named here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dispfx.ir.cached_inputs import CACHED_INPUTS, CacheTensor
from dispfx.settings.verb_settings import LONGEST_CONTEXT
from dispfx.source.source import named_context

GENAI_FILE = "genai_config.json"


def write_genai_config(
    folder: Path,
    *,
    model_file: str,
    caches: Sequence[CacheTensor],
    inputs: Sequence[str],
    vocabulary_size: int,
    config: Any,
    generation_config: Any = None,
) -> None:
    """Write genai_config.json into `folder`.

    Args:
        caches: of the model, two a layer.
        inputs: names of the model's inputs; a decoder may count positions by itself.
        config, generation_config: the decoder's own; a token is taken from the second first.
    """
    keys = [cache for cache in caches if cache.name.endswith(".key")]
    context = named_context(config) or LONGEST_CONTEXT

    def token(name: str) -> int | list[int] | None:
        return _token(name, vocabulary_size, generation_config, config)

    eos = token("eos_token_id")
    # genai needs one that the vocabulary has (0.18 refuses any other): a text then ends at token 0.
    eos = 0 if eos is None else eos
    pad = token("pad_token_id")
    entries = {
        "model": {
            "type": "decoder",
            "context_length": context,
            "vocab_size": vocabulary_size,
            "bos_token_id": _first(token("bos_token_id")),
            "eos_token_id": eos,
            "pad_token_id": _first(eos if pad is None else pad),
            "decoder": {
                "filename": model_file,
                "head_size": keys[0].size,
                "hidden_size": _number(config, "hidden_size", 0),
                "num_attention_heads": _number(config, "num_attention_heads", keys[0].heads),
                "num_key_value_heads": keys[0].heads,
                "num_hidden_layers": len(keys),
                "inputs": {
                    **{name: name for name in CACHED_INPUTS if name in inputs},
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            },
        },
        "search": {
            "do_sample": False,
            "max_length": context,
            "num_beams": 1,
            "past_present_share_buffer": False,
        },
    }
    text = json.dumps(entries, indent=2) + "\n"
    (folder / GENAI_FILE).write_text(text, encoding="utf-8")


def _number(config: Any, name: str, default: int) -> int:
    """Return a number of a config, or the default where it has none, or one for each layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:
        return default


def _token(name: str, vocabulary_size: int, *configs: Any) -> int | list[int] | None:
    """Return the token or tokens that a config names and the vocabulary has, or None."""
    for config in configs:
        found = getattr(config, name, None)
        several = found if isinstance(found, list | tuple) else [found]
        known = [token for token in several if type(token) is int and 0 <= token < vocabulary_size]
        if known:
            return known if isinstance(found, list | tuple) else known[0]
    return None


def _first(token: int | list[int] | None) -> int:
    """Return one token; genai reads a number everywhere, and 0 is one that every vocabulary has."""
    if isinstance(token, list):
        return token[0]
    return 0 if token is None else token
