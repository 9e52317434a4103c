"""Run by a Python that has vLLM and dispfx: greedy continuations of prompts by several folders.

The arguments are JSON and a file.  The JSON is a list of runs, each with `folder`, `batches` of prompts,
`tokens` to add, and `options` of the engine.  Each run adds a line of JSON to the file.
"""

import json
import os
import sys
from typing import Any

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 128,
}

_KEPT: list[LLM] = []


def main() -> None:
    """Start an engine for each run, one after the other."""
    for asked in json.loads(sys.argv[1]):
        try:
            found = run(asked)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        # Of several processes that torchrun started, one writes what all of them found.
        if os.environ.get("RANK", "0") == "0":
            with open(sys.argv[2], "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(found)}\n")


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens that follow each prompt of each batch, and how many of a prompt's were cached."""
    engine = LLM(asked["folder"], **(_ENGINE | asked["options"]))
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    batches = []
    for batch in asked["batches"]:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch]
        batches.append(engine.generate(prompts, greedy, use_tqdm=False))
    if "RANK" in os.environ:
        # An engine that goes takes the process group along, and ranks would not meet again in time.
        _KEPT.append(engine)
    else:
        engine.llm_engine.engine_core.shutdown()
    return {
        "greedy": [[list(result.outputs[0].token_ids) for result in results] for results in batches],
        "cached": [[result.num_cached_tokens for result in results] for results in batches],
    }


if __name__ == "__main__":
    main()
