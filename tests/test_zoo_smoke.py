"""One architecture of transformers for each pattern of a layer, compiled with no architecture named.

The whole registry is swept by `tools/zoo.py`; this selection keeps every pattern in the checks.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import dispfx
from dispfx.analysis.coverage import coverage
from dispfx.plan.plan import Plan
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip

# Pattern -> (model type, what differs from SIZES).
PATTERNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pre-norm, gated MLP": ("llama", {}),
    "head size unlike width / heads, norms on query and key": ("qwen3", {"head_dim": 16}),
    "biases on query, key and value": ("qwen2", {}),
    "transposed weights, fused qkv": ("gpt2", GPT),
    "fused qkv and fused gate-up": ("phi3", {}),
    "fused qkv interleaved by head": ("bloom", {"n_layer": 2, "n_head": 4}),
    "parallel branches, one add": ("cohere", {}),
    "parallel branches, two adds": ("gpt_neox", {}),
    "parallel branches, one norm": ("phi", {}),
    "plain MLP, layer norm with bias": ("starcoder2", {}),
    "squared activation": ("nemotron", {}),
    "norm on the branch output only": ("olmo2", {}),
    "sandwich norms, scaled embedding": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "norm without weights": ("olmo", {}),
    "scaled branches and logits": ("granite", {"residual_multiplier": 0.3, "embedding_multiplier": 3.0}),
    "learned positions, pre-norm": ("opt", OPT),
    "post-norm stream, projected embedding": (
        "opt", OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "post-norm stream": ("roberta", {"is_decoder": True, "pad_token_id": 1}),
    "alternating local attention": ("gpt_neo", {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8,
    }),
    "mixture of experts": ("mixtral", EXPERTS),
    "routed and shared experts": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "latent attention, dense and expert layers": ("deepseek_v3", LATENT | EXPERTS),
    "convolution and attention": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "differential attention": ("diffllama", {"num_key_value_heads": 4}),
    "sub-layer norms inside the branches": ("bitnet", {}),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """Return a seeded tiny decoder of a pattern."""
    model_type, changes = PATTERNS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    options = {"experts_implementation": "batched_mm"} if "num_experts" in changes else {}
    return perturb(AutoModelForCausalLM.from_config(config, **options))


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_compiles_without_a_refusal(name: str):
    program = dispfx.capture(build(name))
    assert not program.refused
    assert coverage(program).share >= 0.95, coverage(program).ungated
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    everything = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
    assert torch.equal(everything(ids), program.graph_module(ids))
    plan = Plan.random(program, 0.3, seed=1)
    expected = dispfx.gated(program, plan)(ids)
    assert relative_error(dispfx.lower(program, plan)(ids), expected) <= 1e-4
    assert relative_error(dispfx.lower(program, plan, write="gather-add")(ids), expected) <= 1e-4


def test_a_recurrence_over_time_is_refused_with_its_reason():
    config = AutoConfig.for_model(
        "mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(dispfx.DispfxError, match="does not run at"):
        dispfx.capture(model)


@pytest.mark.parametrize("name", ["pre-norm, gated MLP", "sandwich norms, scaled embedding"])
def test_a_bfloat16_decoder_compiles_as_its_float32_twin_does(name: str):
    program = dispfx.capture(build(name).to(torch.bfloat16))
    assert not program.refused
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    everything = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
    assert torch.equal(everything(ids), program.graph_module(ids))
    plan = Plan.random(program, 0.3, seed=1)
    # √(6 · 2 layers) · 2⁻⁸, as `dispfx.verification.graphs.TOLERANCES` derives it.
    assert relative_error(dispfx.lower(program, plan)(ids), dispfx.gated(program, plan)(ids)) <= 2**-6
