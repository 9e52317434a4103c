#!/usr/bin/env python
"""Measure a step of learning on shapes of well-known decoders, with random weights.

    python tools/bench_learn.py --out DIR                      on CUDA: 135M, 7B and 13B shapes, and variants
    python tools/bench_learn.py --out DIR --rows 7b            one shape
    python tools/bench_learn.py --out DIR --rows 7b --variants default apart --profile
    python tools/bench_learn.py --out DIR --tiny --device cpu  the same rows at sizes for a test

A step is everything: tokens, hypernetwork, sampling, forward and backward pass, count and budget, optimizer,
record.  Before a row is measured, its way to compute is compared with the ordinary gated graph; what was
compared and found is in the row's notes.  `overhead` is a step with the decoder replaced by a sum; `products`
are the decoder's products alone (learning_profile.py), and `--profile` writes its kernels too.  Rows are
written as soon as they are there: learn.json and learn.md.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from decoder_shapes import LAYERS, config_of, vocabulary_of
from kernels import Kernel, kernels_of, profiled
from learning_profile import decoder_markdown, hypernetwork_markdown, products_alone
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from dispfx.compiler.programs import capture
from dispfx.estimate.run_estimate import estimate
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.ir.program import Program
from dispfx.learning.records import StepRecord
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch, learn
from dispfx.plan.budget import Budget
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of, task_of
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings

# Name -> shape (decoder_shapes.py), batch and tokens of a step.
SHAPES = {"135m": ("smollm2-135m", 8, 1024), "7b": ("llama-2-7b", 1, 2048), "13b": ("llama-2-13b", 1, 2048)}
TINY = ("tiny", 2, 32)
TINY_LAYERS, TINY_VOCABULARY = 2, 512
# Attention with a mask, as in the ordinary capture, has fewer kernels.
_OTHERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@dataclass(frozen=True)
class Variant:
    """A way to run the decoder.

    Args:
        attention: the kernels that attention may take, the first that can; by default torch's own order.
        blas: the library of products; torch's choice by default.
        inductor: options of the compiler of layers.
    """

    compute: ComputeSettings = field(default_factory=ComputeSettings)
    attention: tuple[SDPBackend, ...] = ()
    blas: str | None = None
    inductor: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Hold torch to the variant's kernels."""
        before = torch.backends.cuda.preferred_blas_library()
        with ExitStack() as stack:
            stack.enter_context(inductor_config.patch(self.inductor))
            if self.attention:
                # Compiled layers are found again by their operations, whatever kernels those took then.
                stack.enter_context(inductor_config.patch(force_disable_caches=True))
                stack.enter_context(sdpa_kernel([*self.attention], set_priority=True))
            if self.blas is not None and torch.cuda.is_available():
                torch.backends.cuda.preferred_blas_library(self.blas)
                stack.callback(torch.backends.cuda.preferred_blas_library, before)
            yield


VARIANTS = {
    "default": Variant(),
    "apart": Variant(ComputeSettings(join=False)),
    "flash": Variant(attention=(SDPBackend.FLASH_ATTENTION, *_OTHERS)),
    "cudnn": Variant(attention=(SDPBackend.CUDNN_ATTENTION, *_OTHERS)),
    "cublaslt": Variant(blas="cublaslt"),
    "reductions": Variant(inductor={"triton.mix_order_reduction_non_strict_mode": True}),
    "tuned": Variant(inductor={"coordinate_descent_tuning": True}),
    "kernels by trial": Variant(inductor={"triton.multi_kernel": 1}),
    "no graph": Variant(ComputeSettings(replay="off")),
    "checkpointing": Variant(ComputeSettings(checkpointing="on")),
    "eager": Variant(ComputeSettings(compile="off")),
}
ORDER = [
    ("135m", "default"),
    ("7b", "default"),
    ("7b", "apart"),
    ("7b", "cudnn"),
    ("7b", "flash"),
    ("7b", "cublaslt"),
    ("7b", "reductions"),
    ("7b", "tuned"),
    ("7b", "kernels by trial"),
    ("13b", "default"),
    ("13b", "apart"),
    ("13b", "cudnn"),
    ("13b", "reductions"),
    ("13b", "tuned"),
    ("13b", "kernels by trial"),
    ("135m", "apart"),
    ("135m", "no graph"),
    ("7b", "no graph"),
    ("7b", "checkpointing"),
    ("135m", "eager"),
    ("7b", "eager"),
]
GOALS = {"135m": "40 ms", "7b": "105 ms, 23 GiB", "13b": "190 ms"}


@dataclass
class Row:
    """One measured way to learn on one shape; what could not be measured is None."""

    shape: str
    variant: str
    batch: int
    tokens: int
    milliseconds: float | None = None
    overhead_milliseconds: float | None = None
    decoder_milliseconds: float | None = None
    peak_gib: float | None = None
    useful_tflops: float | None = None
    products_milliseconds: float | None = None
    products_tflops: float | None = None
    open_seconds: float | None = None
    prepare_seconds: float | None = None
    layers: int = 0
    sites: int = 0
    features: int = 0
    notes: list[str] = field(default_factory=list)
    error: str | None = None


class StandIn:
    """A decoder that costs nothing: its loss is a sum over the masks."""

    def __call__(self, ids_BT: Tensor, masks: Any) -> Tensor:
        raise NotImplementedError("a stand-in has no logits")

    def loss(self, ids_BT: Tensor, masks_N: Tensor) -> Tensor:
        """Return something with a gradient for every mask."""
        return masks_N.mean()

    next_token_loss = loss


def main() -> None:
    """Measure the rows that fit the time, and write each."""
    chosen = _arguments()
    deadline = time.monotonic() + chosen.budget_seconds
    rows: list[Row] = []
    programs: dict[str, tuple[Program, float]] = {}
    for shape, variant in ORDER:
        if (chosen.rows and shape not in chosen.rows) or variant not in chosen.variants:
            continue
        if time.monotonic() > deadline:
            print(f"left out for time: {shape}, {variant}", flush=True)
            continue
        rows.append(_measured(shape, variant, chosen, programs))
        _write(rows, chosen)
        print(_line(rows[-1]), *(f"    {note}" for note in rows[-1].notes), sep="\n", flush=True)
    sys.exit(1 if any(row.error for row in rows) else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for learn.json and learn.md")
    parser.add_argument("--rows", nargs="*", choices=list(SHAPES), help="shapes to measure (all)")
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--profile", action="store_true", help="write the kernels of the decoder's part")
    parser.add_argument("--steps", type=int, default=40, help="steps that are measured")
    parser.add_argument("--budget-seconds", type=float, default=280.0, help="no row begins after that")
    return parser.parse_args()


def _measured(
    shape: str, variant: str, chosen: argparse.Namespace, programs: dict[str, tuple[Program, float]]
) -> Row:
    _, batch, tokens = TINY if chosen.tiny else SHAPES[shape]
    row = Row(shape, variant, batch, tokens)
    torch._dynamo.reset()
    try:
        if shape not in programs:
            programs.clear()  # one decoder at a time
            _collect()
            programs[shape] = _open(shape, chosen)
        program, row.open_seconds = programs[shape]
        with VARIANTS[variant].chosen():
            _measure(row, program, VARIANTS[variant].compute, chosen)
    except Exception as error:
        row.error = f"{type(error).__name__}: {str(error)[:500]}"
    _collect()
    return row


def _open(shape: str, chosen: argparse.Namespace) -> tuple[Program, float]:
    began = time.perf_counter()
    name = SHAPES[shape][0]
    config = config_of(name, LAYERS[name], vocabulary_of(name))
    if chosen.tiny:
        config = config_of(TINY[0], TINY_LAYERS, TINY_VOCABULARY)
    torch.manual_seed(0)
    with torch.device(chosen.device):
        decoder = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    program = capture(decoder.eval())
    return program, time.perf_counter() - began


def _measure(row: Row, program: Program, compute: ComputeSettings, chosen: argparse.Namespace) -> None:
    settings = LearnSettings(steps=chosen.steps + 10, seq_len=row.tokens, batch_size=row.batch)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(program.vocabulary_size, (64 * row.batch * row.tokens,), generator=generator)
    text = batches_of(ids, settings)
    row.layers = len({site.branch.rsplit(".", 1)[0] for site in program.sites})
    row.sites, row.features = len(program.sites), sum(site.size for site in program.sites)
    row.overhead_milliseconds = _step_milliseconds(StandIn(), program, text, settings)[0]
    if chosen.profile and torch.cuda.is_available():
        kernels = _kernels_of_steps(program, text, settings)
        name = f"{row.shape}, {row.variant}"
        _append(chosen, hypernetwork_markdown(name, kernels, row.overhead_milliseconds))
    began = time.perf_counter()
    prepared = prepared_loss(program, text, settings, compute, note=row.notes.append)
    _wait()
    row.prepare_seconds = time.perf_counter() - began
    ids_BT = text.batch(0).to(program.device)
    masks_N = torch.ones(row.features, device=program.device, requires_grad=True)
    decode = partial(_once, prepared.loss, ids_BT, masks_N)
    row.decoder_milliseconds = _decoder_milliseconds(decode)
    row.milliseconds, row.peak_gib = _step_milliseconds(prepared, program, text, settings)
    work = estimate(program, settings).work.total
    row.useful_tflops = work / row.milliseconds / 1e9
    if isinstance(prepared.decoder, TrainingDecoder):
        _profile(row, prepared.decoder, decode, chosen)


def _once(loss: Callable[[Tensor, Tensor], Tensor], ids_BT: Tensor, masks_N: Tensor) -> None:
    loss(ids_BT, masks_N).backward()


def _profile(
    row: Row, decoder: TrainingDecoder, decode: Callable[[], None], chosen: argparse.Namespace
) -> None:
    products = products_alone(decoder, row.batch * row.tokens, _wait)
    row.products_milliseconds = 1e3 * products.seconds
    row.products_tflops = products.operations / products.seconds / 1e12
    if chosen.profile and torch.cuda.is_available():
        _append(chosen, decoder_markdown(f"{row.shape}, {row.variant}", kernels_of(decode), products))


def _append(chosen: argparse.Namespace, page: str) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (chosen.out / "profile.md").open("a", encoding="utf-8") as file:
        file.write(page)


def _kernels_of_steps(program: Program, text: TokenBatches, settings: LearnSettings) -> list[Kernel]:
    """Return the kernels of a step that has a stand-in for its decoder."""
    first, last = 10, settings.steps - 5
    found: list[Kernel] = []
    with ExitStack() as stack:

        def stepped(record: StepRecord) -> None:
            nonlocal found
            if record.step == first:
                found = stack.enter_context(profiled(last - first))
            if record.step == last:
                stack.close()

        _learn(StandIn(), program, text, settings, stepped)
    return found


def _step_milliseconds(
    gated: Any, program: Program, text: TokenBatches, settings: LearnSettings
) -> tuple[float, float | None]:
    """Return the median time of a step of a run of learning, and the memory that it holds on the device."""
    ends: list[float] = []

    def stepped(record: object) -> None:
        ends.append(time.perf_counter())
        if len(ends) == 5 and torch.cuda.is_available():
            torch.cuda.empty_cache()

    _learn(gated, program, text, settings, stepped)
    times = [after - before for before, after in pairwise(ends[9:])]
    # What a CUDA graph uses again and again is reserved and not allocated while it does not run.
    peak = torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else None
    return 1e3 * statistics.median(times), peak


def _learn(
    gated: Any,
    program: Program,
    text: TokenBatches,
    settings: LearnSettings,
    on_step: Callable[[StepRecord], None],
) -> None:
    task = task_of(program, gated, text, Budget(0.3, "blocks", 8), settings)
    learn(task, Watch(on_step=on_step))


def _decoder_milliseconds(decode: Callable[[], None]) -> float:
    times = []
    for _ in range(8):
        _wait()
        began = time.perf_counter()
        decode()
        _wait()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[2:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _line(row: Row) -> str:
    if row.error:
        return f"{row.shape:5} {row.variant:14} {row.error}"
    peak = "–" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
    products = "–" if row.products_milliseconds is None else f"{row.products_milliseconds:7.1f} ms"
    overhead = row.overhead_milliseconds or 0.0
    share = overhead / (row.milliseconds or 1.0)
    return (
        f"{row.shape:5} {row.variant:14} step {row.milliseconds:7.1f} ms, products "
        f"{products}, decoder {row.decoder_milliseconds:7.1f} ms, overhead {overhead:5.1f} ms ({share:.1%}), "
        f"peak {peak}, {row.useful_tflops:.0f} TFLOP/s, opened in {row.open_seconds:.0f} s, prepared in "
        f"{row.prepare_seconds:.0f} s"
    )


def _environment(chosen: argparse.Namespace) -> dict[str, Any]:
    import transformers

    cuda = chosen.device.startswith("cuda")
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "revision": revision.stdout.strip(),
        "dtype": "bfloat16",
        "tiny": chosen.tiny,
    }


def _write(rows: list[Row], chosen: argparse.Namespace) -> None:
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = {"environment": _environment(chosen), "rows": [asdict(row) for row in rows]}
    (chosen.out / "learn.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (chosen.out / "learn.md").write_text(_markdown(rows, found["environment"]), encoding="utf-8")


def _markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    about = ", ".join(f"{key} {value}" for key, value in environment.items())
    lines = [
        f"A step of learning, all of it, random weights ({about}).",
        "",
        "| shape | variant | batch × tokens | step | goal | decoder | products alone | overhead | share "
        "| peak | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row.shape} | {row.variant} | {row.batch} × {row.tokens} |"
        if row.error:
            lines.append(f"{head} failed: {row.error.splitlines()[0]} | | | | | | | |")
            continue
        assert row.milliseconds and row.overhead_milliseconds is not None
        share = row.overhead_milliseconds / row.milliseconds
        peak = "–" if row.peak_gib is None else f"{row.peak_gib:.1f} GiB"
        products = "–" if row.products_milliseconds is None else f"{row.products_milliseconds:.1f} ms"
        lines.append(
            f"{head} {row.milliseconds:.1f} ms | {GOALS[row.shape]} | {row.decoder_milliseconds:.1f} ms | "
            f"{products} | "
            f"{row.overhead_milliseconds:.1f} ms | {share:.1%} | {peak} | "
            f"{row.useful_tflops:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
