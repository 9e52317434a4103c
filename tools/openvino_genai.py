#!/usr/bin/env python3
"""Make a folder that OpenVINO GenAI opens, from the ONNX model of a pruned folder.

    python tools/openvino_genai.py DIR/onnx OUT        needs openvino-genai, openvino-tokenizers, transformers
    openvino_genai.LLMPipeline("OUT", "CPU").generate("copy abc xyz =", max_new_tokens=8)

The KV cache is an input and an output in ONNX, and a state inside the model here:

    state → gather(beam_idx) → decoder → state          empty at first, for as many sequences as are given
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import openvino  # type: ignore[import-not-found]
from openvino import opset13 as ops  # type: ignore[import-not-found]
from openvino._offline_transformations import (  # type: ignore[import-not-found]
    apply_make_stateful_transformation,
)
from openvino_tokenizers import convert_tokenizer  # type: ignore[import-not-found]
from transformers import AutoTokenizer

_PAST, _PRESENT = "past_key_values.", "present."
# What a pipeline reads besides the models: settings of generation, and the chat template.
_BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip


def main() -> int:
    """Write OUT; 2 where that is not possible."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder onnx of a pruned decoder")
    parser.add_argument("out", type=Path, help="folder to write; it must not exist")
    args = parser.parse_args()
    if not (args.source / "model.onnx").is_file() or args.out.exists():
        print("error: there is no model.onnx to read, or the folder to write exists", file=sys.stderr)
        return 2
    model = openvino.Core().read_model(args.source / "model.onnx")
    if not keep_cache_inside(model):
        print("error: this ONNX model has no KV cache", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True)
    openvino.save_model(model, args.out / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    for name, made in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        openvino.save_model(made, args.out / f"openvino_{name}.xml")
    for name in _BESIDE:
        if (args.source / name).is_file():
            shutil.copy(args.source / name, args.out)
    return 0


def keep_cache_inside(model: openvino.Model) -> bool:
    """Turn the inputs and outputs of the KV cache into states; False if it has no cache."""
    rows = ops.parameter([-1], np.int32, name="beam_idx")
    rows.output(0).get_tensor().set_names({"beam_idx"})
    pairs = {}
    for given in model.inputs:
        name = given.get_any_name()
        if not name.startswith(_PAST):
            continue
        readers = given.get_target_inputs()
        of_rows = ops.gather(given, rows, 0)
        for reader in readers:
            reader.replace_source_output(of_rows.output(0))
        pairs[name] = _PRESENT + name.removeprefix(_PAST)
    if not pairs:
        return False
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, pairs)
    _begin_empty(model)
    model.validate_nodes_and_infer_types()
    return True


def _begin_empty(model: openvino.Model) -> None:
    """Let every state begin without tokens, for the sequences of the first batch."""
    ids = model.input("input_ids")
    sequences = ops.gather(ops.shape_of(ids, "i64"), ops.constant(np.array([0])), ops.constant(0))
    for node in model.get_ops():
        if node.get_type_name() != "ReadValue":
            continue
        heads, tokens, width = (size.min_length for size in node.get_output_partial_shape(0)[1:])
        shape = ops.concat([sequences, ops.constant(np.array([heads, tokens, width]))], 0)
        node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape)])


if __name__ == "__main__":
    sys.exit(main())
