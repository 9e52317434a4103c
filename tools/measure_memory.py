#!/usr/bin/env python3
"""Compare estimates of the memory that learning takes with what processes took.

    tools/measure_memory.py demo 8 128 grouped 2 256 model.gguf 2 256 --out record.json
    tools/measure_memory.py 7b 1 2048 --device cuda --dtype bfloat16 --out record.json

Each MODEL is followed by sequences and tokens of a batch.  Of random weights there are `grouped` (38 million
parameters, heads share keys and values), `experts` (45 million, a mixture of 8), `biased` (38 million, biases
and LayerNorm), `large` (110 million) and `7b`.  Every decoder is learned for two steps in its own process,
not compiled, without checkpoints.  Measured is the largest resident memory while it learns, less what was
resident before; on a GPU it is what torch reserved, and `allocated` is what tensors took of it.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SMALL: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
_SMALL |= {"vocab_size": 16_000}
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Qwen3", _SMALL | {"intermediate_size": 1408, "num_key_value_heads": 2, "head_dim": 64}),
    "experts": (
        "Mixtral",
        _SMALL
        | {"intermediate_size": 384, "num_hidden_layers": 5, "num_local_experts": 8}
        | {"num_key_value_heads": 4},
    ),
    "biased": ("GPT2", {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 16_000}),
    "large": (
        "Llama",
        _SMALL
        | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
        | {"num_attention_heads": 12},
    ),
    "7b": ("Llama", {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}),
}
_STATUS = Path("/proc/self/status")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="MODEL BATCH TOKENS, any number of times")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "BATCH", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, batch, tokens = args.one
        print(json.dumps(measure(model, int(batch), int(tokens), args.device, args.dtype)))
        return
    if len(args.cases) % 3 or not args.cases:
        parser.error("MODEL BATCH TOKENS come in threes")
    rows = []
    for start in range(0, len(args.cases), 3):
        words = [sys.executable, "-W", "ignore", __file__, "--device", args.device, "--dtype", args.dtype]
        words += ["--one", *args.cases[start : start + 3]]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"{args.cases[start]} failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(_line(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _line(row: dict[str, Any]) -> str:
    estimated, measured = row["estimated"], row["measured"]
    line = (
        f"{row['model']:32} {row['batch']} × {row['tokens']:<5} estimated {estimated / 1e6:9.1f} MB, "
        f"measured {measured / 1e6:9.1f} MB: {estimated / measured - 1:+.1%}"
    )
    return line if "allocated" not in row else f"{line}; allocated {row['allocated'] / 1e6:9.1f} MB"


def measure(model: str, batch: int, tokens: int, device: str, dtype: Any) -> dict[str, Any]:
    """Learn for two steps, and return bytes as estimated and as they were."""
    import torch

    from dispfx.api import capture, learn
    from dispfx.estimate.run_estimate import estimate
    from dispfx.run.opening import open_model
    from dispfx.settings import ComputeSettings, ModelSettings, learn_settings

    torch.set_num_threads(1)
    if model in RANDOM:
        decoder = _random(model, device, dtype)
    else:
        decoder = open_model(ModelSettings(model, device=device, dtype=dtype)).model
    program = capture(decoder)
    settings = learn_settings(model, batch_size=batch, seq_len=tokens, steps=2)
    text = torch.randint(program.vocabulary_size or 100, (4 * batch * tokens,))
    found = estimate(program, settings)
    before = _settle(device)
    began = time.monotonic()
    learn(program, text, 0.3, settings=settings, compute=ComputeSettings("off", "off"))
    return {
        "model": Path(model).name,
        "batch": batch,
        "tokens": tokens,
        "estimated": found.beside_weights(),
        **_measured(device, before),
        "weights": sum(tensor.nbytes for tensor in decoder.parameters()),
        "seconds": round(time.monotonic() - began, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": dtype,
    }


def _measured(device: str, before: int) -> dict[str, int]:
    """Return the most that learning took since `_settle`, in bytes."""
    import torch

    if device != "cuda":
        return {"measured": _status("VmHWM") - before}
    return {
        "measured": torch.cuda.max_memory_reserved() - before,
        "allocated": torch.cuda.max_memory_allocated() - before,
    }


def _random(name: str, device: str, dtype: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    kind, sizes = RANDOM[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device(device):
        decoder = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return decoder.eval()


def _settle(device: str) -> int:
    """Give free memory back, let the peak begin anew, and return the bytes that are there now."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
