#!/usr/bin/env python3
"""Measure how many tokens vLLM makes with pruned folders, next to the dense decoder in the same run.

    python tools/bench_vllm.py DIR --dense MODEL
    python tools/bench_vllm.py DIR30 DIR50 --dense MODEL --out speed.json
    python tools/bench_vllm.py DIR --dense MODEL --dtype bfloat16 --batches 1,32,128 --prompt 2048 --new 256

Needs a Python with vLLM and dispfx.  All engines live in this process and take turns, so that a busy or hot
machine slows all; the least time of each counts.  Prompts are random tokens, and prefixes are not cached.
On a CPU the unit is tokens per second of CPU time in this process, on a GPU tokens per second.

    prefill   all tokens of the prompts, and one new token for each
    decode    the new tokens after the first one: the time of all less that of the prefill
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The engine runs in this process, where its CPU time is seen.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

HEAD = "| what | folder | dense, {unit} | pruned, {unit} | times as fast |\n|---|---|---|---|---|"
DENSE = "dense"


@dataclass(frozen=True)
class Load:
    """Prompts of one length, and how many tokens to add to each.

    Args:
        batch: number of prompts.
        prompt: tokens of each.
        new: tokens to add to each, at least 2.
    """

    batch: int
    prompt: int
    new: int

    def prompts(self, vocabulary: int) -> list[dict[str, list[int]]]:
        """Return random token ids, the same for every engine."""
        draw = random.Random(0)
        return [
            {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(self.prompt)]}
            for _ in range(self.batch)
        ]


def main() -> None:
    """Print a table with a line for each kind of load."""
    args = parsed()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    clock = time.process_time if current_platform.is_cpu() else time.perf_counter
    unit = "tokens per CPU second" if current_platform.is_cpu() else "tokens per second"
    engines = {DENSE: engine(args.dense, args)} | {path: engine(path, args) for path in args.folders}
    print(f"\n{HEAD.format(unit=unit)}", flush=True)
    found: dict[str, dict[str, float]] = {}
    for batch in args.batches:
        load = Load(batch, args.prompt, args.new)
        for what, rates in measured(engines, load, args.repeats, clock).items():
            found[what] = rates
            print_rates(what, rates)
        if args.out:
            args.out.write_text(json.dumps({"unit": unit, "rates": found}, indent=1), encoding="utf-8")


def print_rates(what: str, rates: dict[str, float]) -> None:
    """Print a line of the table for each pruned folder."""
    dense = rates[DENSE]
    for path, pruned in rates.items():
        if path != DENSE:
            name = Path(path).name
            print(f"| {what} | {name} | {dense:,.0f} | {pruned:,.0f} | {pruned / dense:.2f} |", flush=True)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "folders", metavar="DIR", nargs="*", help="pruned folders; none measures the dense one"
    )
    options.add_argument(
        "--dense", required=True, metavar="MODEL", help="folder or hub id of the dense decoder"
    )
    options.add_argument("--dtype", default="float32", help="dtype of weights and activations")
    options.add_argument("--batches", type=_numbers, default=[1, 8], help="numbers of prompts, such as 1,8")
    options.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    options.add_argument("--new", type=int, default=65, help="tokens to add to a prompt")
    options.add_argument("--repeats", type=int, default=3, help="how often each engine runs a load")
    options.add_argument(
        "--memory", type=float, default=0.4, help="share of the GPU's memory for each engine"
    )
    options.add_argument(
        "--threads", type=int, default=0, help="threads on a CPU; 0 leaves the choice to vLLM"
    )
    options.add_argument("--out", type=Path, help="JSON file for tokens per second, written after every load")
    options.add_argument("--eager", action="store_true", help="do not compile the decoders")
    return options.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def engine(path: str, args: argparse.Namespace) -> Any:
    """Return an engine that serves a folder."""
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        path,
        dtype=args.dtype,
        max_model_len=args.prompt + args.new,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        gpu_memory_utilization=args.memory,
        skip_tokenizer_init=True,
    )


def measured(
    engines: dict[str, Any], load: Load, repeats: int, clock: Callable[[], float]
) -> dict[str, dict[str, float]]:
    """Return tokens per second of each engine, by what was measured.  The engines take turns."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for name, one in engines.items():
            for new in (1, load.new):
                seconds.setdefault((name, new), []).append(_seconds(one, load, new, clock))
    least = {key: min(times) for key, times in seconds.items()}
    tokens, steps = load.batch * load.prompt, load.batch * (load.new - 1)
    return {
        f"prefill {load.batch} × {load.prompt}": {name: tokens / least[name, 1] for name in engines},
        f"decode {load.batch} ({load.prompt})": {
            name: steps / (least[name, load.new] - least[name, 1]) for name in engines
        },
    }


def _seconds(one: Any, load: Load, new: int, clock: Callable[[], float]) -> float:
    from vllm import SamplingParams  # type: ignore[import-not-found]

    prompts = load.prompts(one.llm_engine.model_config.get_vocab_size())
    greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = clock()
    one.generate(prompts, greedy, use_tqdm=False)
    return clock() - began


if __name__ == "__main__":
    main()
