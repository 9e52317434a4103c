#!/usr/bin/env python
"""Measure a step of learning with sharded weights on several GPUs of one host, and on one GPU.

    torchrun --standalone --nproc-per-node 4 tools/bench_shard.py --out DIR                       CUDA, NCCL
    torchrun --standalone --nproc-per-node 2 tools/bench_shard.py --out DIR --tiny --device cpu   to try it

Two rows, each a whole step (tokens, hypernetwork, forward and backward pass, optimizer, record) on random
weights of the 70B shape, one sequence a card:

    one card       1/N of the layers, all weights on the card, the way that learning chooses there
    N cards        all layers asked for, weights in parts (--shard)

So both rows have as many weights a card.  Efficiency is the second row's TFLOP/s a card over the first's.
Weights are made on the cards, each rank its own rows.  The rows are written as soon as they are there:
shard.json and shard.md.
"""

import argparse
import gc
import json
import platform
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decoder_shapes import LAYERS, config_of, vocabulary_of
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from dispfx.compiler.pipelines import for_learning, run_pipeline
from dispfx.compiler.programs import capture
from dispfx.distributed.ranks import ALONE, Ranks, joined
from dispfx.estimate.run_estimate import estimate
from dispfx.fast_decoder.preparation import PreparedLoss, TrialBatch, prepare
from dispfx.fast_decoder.shards import Sharding
from dispfx.ir.program import Program
from dispfx.ir.retype import placed
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch, follow_run, learn
from dispfx.plan.budget import Budget
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of, task_of
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.words.chosen_device import local_device

SHAPE = "llama-2-70b"
ALL_LAYERS = LAYERS[SHAPE]
TINY_VOCABULARY = 512
GOAL = "at least 45% of one card's efficiency a card"
# Steps before the measured ones.
_WARM_UPS = 4
_STANDARD_DEVIATION = 0.02


@dataclass
class Row:
    """One measured way to learn; what could not be measured is None."""

    name: str
    cards: int
    layers: int
    tokens: int
    milliseconds: float | None = None
    peak_gib: float | None = None
    weights_gib: float | None = None
    tflops_a_card: float | None = None
    efficiency: float | None = None
    open_seconds: float | None = None
    prepare_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


def main() -> None:
    """Measure both rows on every rank; the leading one writes."""
    chosen = _arguments()
    device = local_device(chosen.device)
    assert device is not None
    rows: list[Row] = []
    with joined(device) as ranks:
        if chosen.layers % ranks.size:
            raise SystemExit(f"--layers must be a multiple of the {ranks.size} ranks")
        if not chosen.without_one:
            rows.append(_one_card(chosen, torch.device(device), ranks))
            _write(rows, chosen, ranks)
            _collect()
        rows.append(_in_parts(chosen, torch.device(device), ranks))
        if len(rows) == 2 and rows[0].tflops_a_card and rows[1].tflops_a_card:
            rows[1].efficiency = rows[1].tflops_a_card / rows[0].tflops_a_card
        _write(rows, chosen, ranks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for shard.json and shard.md")
    parser.add_argument("--layers", type=int, default=40, help=f"of the 70B shape's {ALL_LAYERS} (40)")
    parser.add_argument("--tokens", type=int, default=2048, help="a sequence, one a card (2048)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured (8)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--compile", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--without-one", action="store_true", help="leave out the row of one card")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    return parser.parse_args()


def _config(chosen: argparse.Namespace, layers: int) -> LlamaConfig:
    name, vocabulary = ("tiny", TINY_VOCABULARY) if chosen.tiny else (SHAPE, vocabulary_of(SHAPE))
    config = config_of(name, layers, vocabulary)
    assert isinstance(config, LlamaConfig)
    return config


def _one_card(chosen: argparse.Namespace, device: torch.device, ranks: Ranks) -> Row:
    """Learn on every card by itself, with its share of the layers."""
    row = Row("one card", 1, chosen.layers // ranks.size, _tokens(chosen))
    began = time.perf_counter()
    torch.manual_seed(0)
    with device:
        decoder = AutoModelForCausalLM.from_config(_config(chosen, row.layers), dtype=torch.bfloat16)
    program = capture(decoder.eval())
    row.open_seconds = time.perf_counter() - began
    settings, text = _run_of(chosen, program, 1)
    began = time.perf_counter()
    compute = ComputeSettings(chosen.compile, chosen.checkpointing)
    prepared = prepared_loss(program, text, settings, compute, note=row.notes.append)
    row.prepare_seconds = time.perf_counter() - began
    _measure(row, prepared, program, text, settings, device, ALONE)
    row.weights_gib = _gib(sum(tensor.nbytes for tensor in program.parameters.values()))
    return _slowest(row, device)


def _in_parts(chosen: argparse.Namespace, device: torch.device, ranks: Ranks) -> Row:
    """Learn on all cards together; the decoder is captured without values."""
    torch._dynamo.reset()
    row = Row(f"{ranks.size} cards, --shard", ranks.size, chosen.layers, _tokens(chosen))
    began = time.perf_counter()
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(_config(chosen, row.layers), dtype=torch.bfloat16)
    program = capture(decoder.eval())
    row.open_seconds = time.perf_counter() - began
    settings, text = _run_of(chosen, program, ranks.size)
    began = time.perf_counter()
    prepared = _prepared_in_parts(row, chosen, program, text, device, ranks)
    row.prepare_seconds = time.perf_counter() - began
    _measure(row, prepared, program, text, settings, device, ranks)
    total = sum(tensor.numel() * tensor.element_size() for tensor in program.parameters.values())
    row.weights_gib = _gib(total // ranks.size)
    return _slowest(row, device)


def _prepared_in_parts(
    row: Row,
    chosen: argparse.Namespace,
    program: Program,
    text: TokenBatches,
    device: torch.device,
    ranks: Ranks,
) -> PreparedLoss:
    plain = placed(run_pipeline("gate", program.clone()), device)
    _give_buffers(plain, _config(chosen, row.layers), device)
    fast = for_learning(plain, row.tokens)
    kept = estimate(program, LearnSettings(seq_len=row.tokens)).step.kept / 2
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    weights = sum(tensor.numel() * tensor.element_size() for tensor in program.parameters.values())
    return prepare(
        plain,
        fast,
        TrialBatch(ranks.rows(text.batch(0))),
        ComputeSettings(chosen.compile, chosen.checkpointing),
        short_of_memory=kept + weights / ranks.size > 0.75 * free,
        note=row.notes.append,
        agree=lambda holds: ranks.all(holds, device),
        sharding=Sharding(_random_rows(program, device), ranks.size, device),
    )


def _give_buffers(program: Program, config: LlamaConfig, device: torch.device) -> None:
    """Give a program that was captured without values those of its rotary positions."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    frequencies = LlamaRotaryEmbedding(config).inv_freq.to(device)
    for path, buffer in list(program.graph_module.named_buffers()):
        if buffer.is_meta:
            owner, _, name = path.rpartition(".")
            assert name.endswith("inv_freq"), path
            setattr(program.graph_module.get_submodule(owner), name, frequencies)


def _random_rows(program: Program, device: torch.device) -> Callable[[str, slice], Tensor]:
    """Return a source of random weights: those of a norm are ones."""
    shapes = program.shapes

    def fetch(path: str, rows: slice) -> Tensor:
        count, *others = shapes[path]
        size = (len(range(*rows.indices(count))), *others)
        if not others:
            return torch.ones(size, dtype=program.dtype, device=device)
        seed = zlib.crc32(f"{path}:{rows.start}".encode())
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.empty(size, dtype=program.dtype, device=device)
        return values.normal_(0.0, _STANDARD_DEVIATION, generator=generator)

    return fetch


def _tokens(chosen: argparse.Namespace) -> int:
    return 32 if chosen.tiny else chosen.tokens


def _run_of(
    chosen: argparse.Namespace, program: Program, sequences: int
) -> tuple[LearnSettings, TokenBatches]:
    settings = LearnSettings(
        steps=chosen.steps + _WARM_UPS, seq_len=_tokens(chosen), batch_size=sequences, save_every=10**6
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(program.vocabulary_size, (64 * sequences * settings.seq_len,), generator=generator)
    return settings, batches_of(ids, settings)


def _measure(
    row: Row,
    prepared: PreparedLoss,
    program: Program,
    text: TokenBatches,
    settings: LearnSettings,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """Set the time of a step, the peak of memory and the rate of useful operations."""
    task = task_of(program, prepared, text, Budget(0.3, "blocks", 8), settings)
    task = replace(task, device=device, ranks=ranks)
    ends: list[float] = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if ranks.leads:
        learn(task, Watch(on_step=lambda record: ends.append(time.perf_counter())))
        row.milliseconds = 1e3 * statistics.median(
            after - before for before, after in pairwise(ends[_WARM_UPS - 1 :])
        )
        work = estimate(program, settings).work.total
        row.tflops_a_card = work / ranks.size / row.milliseconds / 1e9
    else:
        follow_run(task)
    if device.type == "cuda":
        # What a CUDA graph uses is reserved and not allocated.
        graph = any("CUDA graph" in note and "no CUDA" not in note for note in row.notes)
        peak = torch.cuda.max_memory_reserved if graph else torch.cuda.max_memory_allocated
        row.peak_gib = _gib(peak(device))


def _slowest(row: Row, device: torch.device) -> Row:
    """Return the row with the largest peak of all ranks."""
    if row.peak_gib is not None:
        peak = torch.tensor(row.peak_gib, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        row.peak_gib = float(peak)
    return row


def _gib(count: int) -> float:
    return count / 2**30


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(rows: list[Row], chosen: argparse.Namespace, ranks: Ranks) -> None:
    if not ranks.leads:
        return
    import transformers

    cuda = chosen.device.startswith("cuda")
    environment = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tiny": chosen.tiny,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = {"environment": environment, "rows": [asdict(row) for row in rows]}
    (chosen.out / "shard.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = _markdown(rows, environment)
    (chosen.out / "shard.md").write_text(text, encoding="utf-8")
    print(text, *(f"{row.name}: {note}" for row in rows for note in row.notes), sep="\n", flush=True)


def _markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in environment.items())
    lines = [
        f"A step of learning at the 70B shape, random weights; goal: {GOAL} ({about}).",
        "",
        f"| way | layers of {ALL_LAYERS} | tokens per card | step | weights per card | peak per card "
        "| TFLOP/s per card | efficiency | opened | prepared |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak = "–" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
        share = "–" if row.efficiency is None else f"{row.efficiency:.0%}"
        sizes = (
            f"{row.layers} | {row.tokens} | {row.milliseconds:.1f} ms | {row.weights_gib:.3g} GiB | {peak}"
        )
        took = f"{row.open_seconds:.0f} s | {row.prepare_seconds:.0f} s"
        lines.append(f"| {row.name} | {sizes} | {row.tflops_a_card:.3g} | {share} | {took} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
