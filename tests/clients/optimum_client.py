"""Run by a Python that has optimum-onnx: greedy, beams, and a left-padded batch, as JSON on stdout."""

import json
import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM  # type: ignore[import-not-found]


def main() -> None:
    """The arguments are a folder, two prompts of different lengths as JSON, and how many tokens to add."""
    folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    model = ORTModelForCausalLM.from_pretrained(folder, use_cache=True)
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    single = [torch.tensor([prompt]) for prompt in prompts]
    found = {
        "greedy": [model.generate(ids, **options).tolist()[0] for ids in single],
        "beams": [model.generate(ids, num_beams=3, **options).tolist()[0] for ids in single],
        "padded": model.generate(padded, attention_mask=mask, **options).tolist(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
