#!/usr/bin/env python3
"""Write a decoder of the Llama class as a GGUF file for llama.cpp.

    python tools/gguf_file.py DIR/dense OUT.gguf                 after --select before-norm --export dense
    python tools/gguf_file.py DIR OUT.gguf --type q8_0           also a plan that cuts no residual stream

1. llama.cpp builds a decoder by the name of its architecture.  `llama` has one width for all layers.  `deci`
   is the same with a number of heads and inner features per layer, and is taken where layers differ.
2. llama.cpp has no gathers between the residual stream and a branch: a folder with indices is rejected.
3. llama.cpp rotates neighbouring features of a head, and transformers feature i with i + half the head, so
   the rows of q and k are reordered.
4. What this file does not know (classes, biases, scaled rotary angles, tokenizers) is rejected by name.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from gguf.quants import quantize
from safetensors import safe_open
from torch import Tensor

from dispfx.huggingface.layout import INDEX_NAMES, MARK

_CLASS = "LlamaForCausalLM"
_TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROTATED = ("attn_q", "attn_k")
_SPLITS_LIKE_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


class Unwritten(Exception):
    """The folder holds something that this file cannot write."""


def main() -> int:
    """Write the file; 2 where that is not possible."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with config.json, weights and tokenizer.json")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--type", choices=_TYPES, default="f32", help="of the matrices")
    parser.add_argument("--pre", default=None, help="llama.cpp's name for how the tokenizer splits text")
    args = parser.parse_args()
    try:
        write_gguf(args.folder, args.out, args.type, args.pre)
    except (Unwritten, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


def write_gguf(folder: Path, out: Path, kind: str = "f32", pre: str | None = None) -> None:
    """Write the decoder in `folder` to `out`.

    Args:
        kind: of the matrices; a matrix whose rows are no multiple of 32 stays float16 instead of q8_0.
        pre: llama.cpp's name for how the tokenizer splits text, where this file does not know it.

    Raises:
        Unwritten: with the name of what cannot be written (rules 2 and 4).
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _require_plain(config)
    stored = _stored(folder)
    named = {_new_name(name): tensor for name, tensor in stored.items()}
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = range(config["num_hidden_layers"])
    heads, shared, widths = (
        [named[f"blk.{layer}.{name}.weight"].shape[0] // size for layer in layers]
        for name, size in (("attn_q", head), ("attn_k", head), ("ffn_up", 1))
    )
    equal = all(len(set(sizes)) == 1 for sizes in (heads, shared, widths))
    writer = GGUFWriter(out, "llama" if equal else "deci")
    writer.add_file_type(_TYPES[kind][1])
    writer.add_block_count(len(layers))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(named["token_embd.weight"].shape[1])
    writer.add_head_count(heads[0] if equal else heads)
    writer.add_head_count_kv(shared[0] if equal else shared)
    writer.add_feed_forward_length(widths[0] if equal else widths)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for add in (writer.add_rope_dimension_count, writer.add_key_length, writer.add_value_length):
        add(head)
    writer.add_vocab_size(named["token_embd.weight"].shape[0])
    _add_tokenizer(writer, folder, config, named["token_embd.weight"].shape[0], pre)
    for name, tensor in named.items():
        values = tensor.float().numpy()
        if name.split(".")[-2] in _ROTATED:
            values = rotated_as_neighbours(values, head)
        form = _form(values, kind)
        writer.add_tensor(name, quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rotated_as_neighbours(rows: np.ndarray, head: int) -> np.ndarray:
    """Return the rows of q or k, of shape (heads · head, width), in llama.cpp's order (rule 3)."""
    halves = rows.reshape(-1, 2, head // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _form(values: np.ndarray, kind: str) -> GGMLQuantizationType:
    if values.ndim == 1:
        return GGMLQuantizationType.F32
    if kind == "q8_0" and values.shape[-1] % 32:
        return GGMLQuantizationType.F16
    return _TYPES[kind][0]


def _require_plain(config: Mapping[str, Any]) -> None:
    """Pass if the config says nothing that this file would leave out (rule 4)."""
    found = config.get("architectures")
    if found != [_CLASS]:
        raise Unwritten(f"only {_CLASS} can be written; this is {found}. Use llama.cpp's own converter")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unwritten(f"rope_parameters {rope}: only rope_type default can be written")
    if config.get("hidden_act") != "silu":
        raise Unwritten(f"hidden_act {config.get('hidden_act')!r}: only silu can be written")


def _stored(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder by name.

    Raises:
        Unwritten: if it has an index (rule 2).
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    found: dict[str, Tensor] = {}
    for name in sorted(files):
        with safe_open(folder / name, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    indices = [name for name in found if name.endswith(INDEX_NAMES)]
    if indices:
        raise Unwritten(
            f"{len(indices)} indices, such as {indices[0]}: llama.cpp cannot gather features. "
            "Compile with --constrained --select before-norm --export dense, and write DIR/dense"
        )
    return {name: tensor for name, tensor in found.items() if not name.startswith(MARK)}


def _new_name(name: str) -> str:
    """Return llama.cpp's name of a tensor.

    Raises:
        Unwritten: if it has none (rule 4).
    """
    if name in _NAMES:
        return _NAMES[name]
    words = name.split(".")
    module = ".".join(words[3:-1])
    if words[:2] != ["model", "layers"] or words[-1] != "weight" or module not in _OF_LAYER:
        raise Unwritten(f"tensor {name}: llama.cpp's {_CLASS} has no place for it here")
    return f"blk.{words[2]}.{_OF_LAYER[module]}.weight"


def _add_tokenizer(
    writer: GGUFWriter, folder: Path, config: Mapping[str, Any], rows: int, pre: str | None
) -> None:
    """Add the tokenizer, a byte-level BPE, with names for rows of the embedding that have no token."""
    entries = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, splits = entries["model"], entries["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("byte_fallback") or entries.get("normalizer"):
        raise Unwritten(f"tokenizer.json: only a byte-level BPE can be written; this is {model['type']}")
    if pre is None and splits != _SPLITS_LIKE_GPT2:
        raise Unwritten(f"tokenizer.json: give --pre, llama.cpp's name for {splits}")
    names = dict(_tokens(entries))
    unused = {token: (f"[PAD{token}]", TokenType.UNUSED) for token in range(rows)}
    tokens, kinds = zip(*((unused | names)[token] for token in range(rows)), strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_add_bos_token(False)
    for name, add in (
        ("bos_token_id", writer.add_bos_token_id),
        ("eos_token_id", writer.add_eos_token_id),
        ("pad_token_id", writer.add_pad_token_id),
    ):
        if isinstance(config.get(name), int):
            add(config[name])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _tokens(entries: Mapping[str, Any]) -> Iterator[tuple[int, tuple[str, TokenType]]]:
    for text, token in entries["model"]["vocab"].items():
        yield token, (text, TokenType.NORMAL)
    for added in entries["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        yield added["id"], (added["content"], kind)


if __name__ == "__main__":
    sys.exit(main())
