"""Five lines that need onnxruntime and numpy only: greedy continuations of prompts, as JSON on stdout."""

import json
import sys

import numpy as np
import onnxruntime


def continued(session: onnxruntime.InferenceSession, prompt: list[int], count: int) -> list[int]:
    """Return the prompt and `count` more tokens; the cache stays where ONNX Runtime put it."""
    ids, past = list(prompt), {}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values."):
            past[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    new = prompt
    for _ in range(count):
        binding = session.io_binding()
        feed = {
            "input_ids": np.array([new]),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids) - len(new), len(ids))[None],
        }
        for name, value in feed.items():
            binding.bind_cpu_input(name, value)
        for name, value in past.items():
            bind = binding.bind_cpu_input if isinstance(value, np.ndarray) else binding.bind_ortvalue_input
            bind(name, value)
        for value in session.get_outputs():
            binding.bind_output(value.name)
        session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        past = dict(zip(past, present, strict=True))
        new = [int(logits.numpy()[0, -1].argmax())]
        ids += new
    return ids


def main() -> None:
    """The arguments are a folder, prompts as JSON, and how many tokens to add."""
    folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    print(json.dumps({"greedy": [continued(session, prompt, count) for prompt in prompts]}))


if __name__ == "__main__":
    main()
