"""Tiny transformers decoders with random weights, one for each arrangement that a cache can meet."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
    RobertaConfig,
)

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_OWN_POSITIONS: dict[str, Any] = _SIZES | {"pad_token_id": 1}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _config(name: str) -> PreTrainedConfig:
    match name:
        case "llama":
            return LlamaConfig(**_SIZES)
        case "qwen3":  # A head size of 16 where width / heads is 8.
            return Qwen3Config(**_SIZES, head_dim=16)
        case "gpt2":
            return GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
            )
        case "neox":
            return GPTNeoXConfig(**_SIZES)
        case "phi":
            rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
            return PhiConfig(**_SIZES, rope_parameters=rope)
        case "gemma2":
            return Gemma2Config(**_SIZES, head_dim=8, query_pre_attn_scalar=8, sliding_window=8)
        case "gemma3":
            kinds = ["sliding_attention", "full_attention"]
            return Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=8, layer_types=kinds)
        case "mixtral":
            return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
        case "roberta":
            return RobertaConfig(**_OWN_POSITIONS, is_decoder=True)
        case "deepseek":  # Latent attention: the cache holds the latents, which are sites.
            return DeepseekV3Config(**_SIZES | _LATENT | _ROUTED)
        case "lfm2":
            return Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"])
    raise KeyError(name)


def tiny_transformer(name: str, *, layers: int = 2) -> nn.Module:
    """Return a seeded decoder in evaluation mode; no parameter is constant, so that none hides an error."""
    torch.manual_seed(0)
    config = _config(name)
    config.num_hidden_layers = layers
    options = {"experts_implementation": "batched_mm"} if name in ("mixtral", "deepseek") else {}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
