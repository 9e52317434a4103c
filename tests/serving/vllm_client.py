"""Run by a Python that has vLLM and dispfx: greedy continuations of prompts, as JSON on a line of stdout that begins with FOUND."""

import json
import sys
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 16,
}


def main() -> None:
    """The argument is JSON: `folder`, `batches` of prompts, `tokens` to add, and `options` of the engine."""
    asked = json.loads(sys.argv[1])
    engine = LLM(asked["folder"], **(_ENGINE | asked["options"]))
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    found = []
    for batch in asked["batches"]:
        results = engine.generate([{"prompt_token_ids": prompt} for prompt in batch], greedy, use_tqdm=False)
        found.append(
            {
                "greedy": [list(result.outputs[0].token_ids) for result in results],
                "cached": [result.num_cached_tokens for result in results],
            }
        )
    print(f"\nFOUND {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
