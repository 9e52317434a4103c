"""Greedy continuations by OpenVINO, which reads model.onnx, as JSON on stdout."""

import json
import sys

import numpy as np
import openvino  # type: ignore[import-not-found]


def continued(model: openvino.CompiledModel, prompt: list[int], count: int) -> list[int]:
    """Return the prompt and `count` more tokens; what comes out as the cache goes in again."""
    ids, new = list(prompt), prompt
    past = {}
    for one in model.inputs:
        name, shape = one.get_any_name(), one.get_partial_shape()
        if name.startswith("past_key_values."):
            past[name] = np.zeros((1, shape[1].get_length(), 0, shape[3].get_length()), np.float32)
    request = model.create_infer_request()
    for _ in range(count):
        feed = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids) - len(new), len(ids))[None],
        }
        logits, *present = request.infer({**feed, **past}).to_tuple()
        past = dict(zip(past, map(np.copy, present), strict=True))
        new = [int(logits[0, -1].argmax())]
        ids += new
    return ids


def main() -> None:
    """The arguments are a folder, prompts as JSON, and how many tokens to add."""
    folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    core = openvino.Core()
    model = core.compile_model(
        core.read_model(f"{folder}/model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    print(json.dumps({"greedy": [continued(model, prompt, count) for prompt in prompts]}))


if __name__ == "__main__":
    main()
