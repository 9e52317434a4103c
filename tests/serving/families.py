"""Tiny random decoders with heads that vLLM takes on a CPU, one for each arrangement of modules."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)

VOCABULARY = 128
POSITIONS = 512
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EQUAL_HEADS: dict[str, Any] = _SIZES | {"num_key_value_heads": 4}
_KINDS = ["sliding_attention", "full_attention"]

# Family → what its modules show.
SHOWN = {
    "llama": "norms before branches, q/k/v and gate/up fused by vLLM",
    "llama_biases": "the same with biases in every linear layer",
    "mistral": "as Llama, with a sliding window",
    "qwen2": "biases of q, k and v alone",
    "qwen3": "norms of heads",
    "gemma2": "sandwich norms, soft caps",
    "gemma3": "sandwich norms, local and global layers",
    "phi3": "q/k/v and gate/up fused on disk",
    "opt": "LayerNorm, biases, positions learned",
    "gpt2": "weights stored transposed, q/k/v fused on disk",
    "olmo2": "no norm before a branch: q, k and v gather by themselves",
    "neox": "parallel branches with a norm each, q/k/v interleaved on disk",
    "phi": "parallel branches that share a norm",
    "starcoder2": "LayerNorm and biases, no gate",
    "stablelm": "LayerNorm and a gate",
}


def _config(name: str) -> PreTrainedConfig:
    match name:
        case "llama":
            return LlamaConfig(**_SIZES)
        case "llama_biases":
            return LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True)
        case "mistral":
            return MistralConfig(**_SIZES, sliding_window=16)
        case "qwen2":
            return Qwen2Config(**_SIZES)
        case "qwen3":
            return Qwen3Config(**_SIZES, head_dim=64)
        case "gemma2":
            return Gemma2Config(**_SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=16)
        case "gemma3":
            return Gemma3TextConfig(**_SIZES, head_dim=32, sliding_window=16, layer_types=_KINDS)
        case "phi3":
            return Phi3Config(**_SIZES)
        case "opt":
            return OPTConfig(
                vocab_size=VOCABULARY, hidden_size=128, word_embed_proj_dim=128, ffn_dim=192,
                num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=POSITIONS,
                bos_token_id=None, eos_token_id=None, pad_token_id=1,
            )  # fmt: skip
        case "gpt2":
            return GPT2Config(
                vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=POSITIONS,
                bos_token_id=None, eos_token_id=None,
            )  # fmt: skip
        case "olmo2":
            return Olmo2Config(**_SIZES)
        case "neox":
            sizes = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
            return GPTNeoXConfig(**sizes)
        case "phi":
            rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
            return PhiConfig(**_EQUAL_HEADS, rope_parameters=rope)
        case "starcoder2":
            return Starcoder2Config(**_SIZES, sliding_window=None)
        case "stablelm":
            return StableLmConfig(**_SIZES)
        case "mixtral":
            return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
    raise KeyError(name)


def tiny_decoder(name: str) -> nn.Module:
    """Return a seeded decoder in evaluation mode; no parameter is constant, so that none hides an error.

    Branches outweigh the embedding, so that a continuation is no repetition of the last token.
    """
    torch.manual_seed(0)
    options = {"experts_implementation": "batched_mm"} if name == "mixtral" else {}
    model = AutoModelForCausalLM.from_config(_config(name), **options).eval()
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            in_branch = parameter.dim() > 1 and parameter is not embedding.weight
            scale = 0.2 if in_branch else 2.0 if parameter.dim() == 1 else 0.05
            parameter.add_(scale * torch.randn_like(parameter))
    return model
