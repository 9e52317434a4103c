#!/usr/bin/env python3
"""Measure a pruned transformers folder: bits, size, loading time, and what a short adapter run gives.

    python tools/huggingface_figures.py DIR --data train.txt --eval-data test.txt --out figures

1. Two fresh processes load DIR and must give the same bits.
2. The bytes of its tensors against kept weights, the rest and indices, counted from the file.
3. Loading time of DIR against a dense checkpoint with the same bytes, both from a warm file cache, in four
   ways: see WAYS.
4. LoRA on all linear layers: perplexity before and after, on text that is not trained on.

Writes OUT.json and OUT.md after every part, so that a failing part does not lose earlier ones.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOAD = """
import sys, time
started = time.perf_counter()
import hashlib
import torch, dispfx
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
path, loads, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = {"dtype": torch.bfloat16} if way == "converted" else {}
best = 1e9
for _ in range(loads):
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    if way == "read":
        sum(float(parameter.detach().max()) for parameter in model.parameters())
    best = min(best, time.perf_counter() - begun)
    whole = time.perf_counter() - started
    if way == "process":
        best = whole
        break
with torch.no_grad():
    logits = model(torch.arange(24).reshape(2, 12)).logits
print(best, hashlib.sha256(logits.float().numpy().tobytes()).hexdigest())
"""
# What is timed: the file mapped and modules made; each weight read once, too; converted to another dtype,
# which reads them all; one load with every import in a new process.
WAYS = ("mapped", "read", "converted", "process")


def main() -> None:
    args = parse_arguments()
    found: dict[str, Any] = {"folder": args.folder.name, "date": time.strftime("%Y-%m-%d"), **versions()}
    parts: list[Callable[[argparse.Namespace], dict[str, Any]]] = [size, loading, adapter]
    for part in parts:
        if part.__name__ in args.skip:
            continue
        try:
            found[part.__name__] = part(args)
        except Exception as error:
            traceback.print_exc()
            found[part.__name__] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(part.__name__, json.dumps(found[part.__name__]), flush=True)
        write(found, args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, help="text to train the adapter on")
    parser.add_argument("--eval-data", type=Path, help="text to measure perplexity on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a training sequence and of a window")
    parser.add_argument("--windows", type=int, default=8, help="windows of perplexity")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loads", type=int, default=5, help="the fastest of so many loads counts")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each, pruned and dense in turns")
    parser.add_argument("--skip", nargs="*", default=[], choices=("size", "loading", "adapter"))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def versions() -> dict[str, str]:
    from importlib import metadata

    names = ("torch", "transformers", "peft")
    return {name: metadata.version(name) for name in names}


def size(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the tensors' bytes with what the plan says must be left of the dense decoder."""
    from dispfx.deploy import weights
    from dispfx.deploy.checkpoint import skeleton
    from dispfx.plan.plan import Plan

    headers = weights.read_headers(args.folder)
    dense = {name: tuple(tensor.shape) for name, tensor in skeleton(args.folder).named_parameters()}
    plan = Plan.load(args.folder / "plan.safetensors")
    left = {name: list(shape) for name, shape in dense.items()}
    for selection in plan.selections:
        for key in selection.keys:
            path, _, axis = key.rpartition(":")
            removed = selection.size - len(selection.kept)
            left[path][int(axis)] -= removed * dense[path][int(axis)] // selection.size
    index_bytes = sum(h.size * h.dtype.itemsize for name, h in headers.items() if weights.is_index(name))
    expected = (
        sum(product(shape) * headers[name].dtype.itemsize for name, shape in left.items()) + index_bytes
    )
    return {
        "file_bytes": weights.count_bytes(args.folder),
        "expected_bytes": expected,
        "index_bytes": index_bytes,
        "ratio": round(weights.count_bytes(args.folder) / expected, 5),
    }


def product(sizes: list[int]) -> int:
    total = 1
    for number in sizes:
        total *= number
    return total


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """Time loads in fresh processes, pruned and dense in turns, and compare bits between processes."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        written, dense, pruned = (Path(folder) / name for name in ("written", "dense", "pruned"))
        found["dense_bytes"] = write_dense_of_same_size(args.folder, written)
        # Both are copies, since how a file was written decides how its pages lie in the cache.
        shutil.copytree(written, dense)
        shutil.copytree(args.folder, pruned, ignore=shutil.ignore_patterns("onnx", "dense"))
        for way in WAYS:
            times: dict[str, list[float]] = {"pruned": [], "dense": []}
            digests = set()
            for _ in range(args.rounds):
                for name, path in (("pruned", pruned), ("dense", dense)):
                    command = [sys.executable, "-c", LOAD, str(path), str(args.loads), way]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    seconds, digest = done.stdout.split()
                    times[name].append(float(seconds))
                    if name == "pruned":
                        digests.add(digest)
            best = {name: min(values) for name, values in times.items()}
            found[way] = {
                "pruned_seconds": round(best["pruned"], 4),
                "dense_seconds": round(best["dense"], 4),
                "ratio": round(best["pruned"] / best["dense"], 3),
                "fresh_processes_agree": len(digests) == 1,
            }
    return found


def write_dense_of_same_size(pruned: Path, path: Path) -> int:
    """Write a dense decoder of the same class with as many bytes, by a smaller inner width of its MLPs."""
    import torch
    from transformers import AutoModelForCausalLM

    from dispfx.deploy import weights
    from dispfx.deploy.checkpoint import own_config

    config = own_config(pruned)
    wanted = weights.count_parameters(pruned)
    for _ in range(40):
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(config).num_parameters()
        if abs(count - wanted) < 0.01 * wanted:
            break
        per_feature = 3 * config.hidden_size * config.num_hidden_layers
        config.intermediate_size = max(8, config.intermediate_size + round((wanted - count) / per_feature))
        if config.intermediate_size == 8:
            config.num_hidden_layers -= 1
    AutoModelForCausalLM.from_config(config).to(config.dtype).save_pretrained(path)
    return (path / "model.safetensors").stat().st_size


def adapter(args: argparse.Namespace) -> dict[str, Any]:
    """Train LoRA on all linear layers for a few steps, and measure perplexity before and after."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import dispfx  # noqa: F401 - lets transformers load the folder

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    train, test = (
        tokenizer(path.read_text(encoding="utf-8")[:4_000_000], return_tensors="pt").input_ids[0]
        for path in (args.data, args.eval_data)
    )
    windows = test[: args.windows * args.tokens].reshape(args.windows, args.tokens)
    before = perplexity(model, windows)
    config = LoraConfig(target_modules="all-linear", r=16, lora_alpha=32, task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=args.lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        starts = torch.randint(len(train) - args.tokens, (args.batch_size,), generator=generator)
        ids = torch.stack([train[start : start + args.tokens] for start in starts])
        tuned(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = perplexity(tuned.eval(), windows)
    trained = sum(p.numel() for p in tuned.parameters() if p.requires_grad)
    return {
        "perplexity_before": round(before, 2),
        "perplexity_after": round(after, 2),
        "steps": args.steps,
        "tokens_a_step": args.batch_size * args.tokens,
        "windows": [args.windows, args.tokens],
        "trained_parameters": trained,
    }


def perplexity(model: Any, windows: Any) -> float:
    import torch

    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss.double() for window in windows]
    return float(torch.stack(losses).mean().exp())


def write(found: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"# Figures of {found['folder']}, {found['date']}", ""]
    for part, values in found.items():
        if isinstance(values, dict):
            lines += [f"- {part}: " + ", ".join(f"{key} {value}" for key, value in values.items())]
    Path(f"{out}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
