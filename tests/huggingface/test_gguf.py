"""A quantised GGUF file is a source like any other: what is written from it is a plain pruned folder."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dispfx
from dispfx.api import apply, capture
from dispfx.source import load_source
from dispfx.verification.equivalence import ModuleDecoder
from dispfx.verification.graphs import zeroed_tensors
from tests.programs import relative_error, token_ids

WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<unk>", "<s>", "</s>", *(chr(33 + index) for index in range(59)), "AB", "BA"]
IDS = token_ids(2, 9, vocabulary=len(TOKENS))


def write_gguf(path: Path) -> None:
    """Write a tiny llama whose matrices are quantised to eight bits in blocks of 32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["A B", "B A"])  # transformers 5.17 does not read a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for name, shape in tensors():
        values = random.normal(size=shape).astype(np.float32) * 0.2 + (len(shape) == 1)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Return the names that GGUF gives to a llama's tensors, and their shapes."""
    keys = WIDTH // HEADS * KV_HEADS
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (len(TOKENS), WIDTH))]
    for layer in range(LAYERS):
        parts = {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (keys, WIDTH),
        }
        parts |= {"attn_v": (keys, WIDTH), "attn_output": (WIDTH, WIDTH), "ffn_gate": (INNER, WIDTH)}
        parts |= {"ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        found += [(f"blk.{layer}.{name}.weight", shape) for name, shape in parts.items()]
    return [*found, ("output_norm.weight", (WIDTH,)), ("output.weight", (len(TOKENS), WIDTH))]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_gguf_file_gives_a_folder_that_from_pretrained_loads(tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    dense = load_source(str(source)).model
    program = capture(dense)
    plan = dispfx.Plan.random(program, 0.4, 0)

    report = apply(str(source), plan, out=tmp_path / "out", export="dense")

    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert entries["quantization_config"]["quant_method"] == "dispfx" and entries["dtype"] == "float32"
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == "LlamaForCausalLM" and not loaded.is_quantized
    with torch.no_grad():
        expected = ModuleDecoder(dense, zeroed_tensors(program, plan))(IDS)
        assert relative_error(loaded(IDS).logits, expected) < 1e-5
        ordinary: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "dense")
        assert relative_error(ordinary(IDS).logits, expected) < 1e-5
    assert not hasattr(ordinary.config, "quantization_config")
    assert report.parameters.pruned == sum(parameter.numel() for parameter in loaded.parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_tokens_to_ids("A") == TOKENS.index("A")
