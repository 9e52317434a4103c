"""Run by a Python that has onnxruntime-genai: greedy continuations of prompts, as JSON on stdout."""

import json
import sys

import numpy as np
import onnxruntime_genai  # type: ignore[import-not-found]


def main() -> None:
    """Continue every prompt alone; arguments: a folder, prompts as JSON, and how many tokens to add."""
    folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = onnxruntime_genai.Model(folder)
    found = []
    for prompt in prompts:
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        found.append([int(token) for token in generator.get_sequence(0)])
    print(json.dumps({"greedy": found}))


if __name__ == "__main__":
    main()
