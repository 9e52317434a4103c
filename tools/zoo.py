#!/usr/bin/env python3
"""Sweep tiny models of every causal language model that transformers registers.

    python tools/zoo.py --builder PATH/tiny_decoders.py --out docs/zoo            every architecture
    python tools/zoo.py --builder PATH/tiny_decoders.py --only llama,gpt2 --dtype bfloat16

Each architecture runs in a process of its own with a time limit: it is captured, analysed, gated with
random plans of 30 %, lowered, and compared at two shapes that were not traced.  The builder is a Python
file with `names()` and `build(name, attn=..., experts=...) -> (module, config)`.

Writes OUT.md and OUT.json.  An architecture counts as compiled when the gated graph with masks of ones
is bit-identical to the captured one, the captured one is within 1e-6 of the module, the lowered decoder
and the module with zeros for what was removed are within --tolerance of the gated one at every shape, and
noise in place of what was removed changes no bit of the gated one.  A mixture of experts is captured in
both ways, and the plan of one must lower the other.

With --cached each architecture is captured with a key-value cache instead, and a prefill of 12 tokens and 20
decode steps must give what one pass over the 32 tokens gives, dense and lowered.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RATIO = 0.3
SEEDS = (1, 2)
SHAPES = ((2, 9), (1, 17))
REQUIRED_SHARE = 0.95
PROMPT, STEPS = 12, 20


@dataclass
class Row:
    """What one architecture did."""

    name: str
    status: str = "error"
    reason: str = ""
    identity: float | None = None
    bit_identical: bool = False
    lowered: float | None = None
    gathered: float | None = None
    zeroed: float | None = None
    unread: bool = False
    experts: float | None = None
    cached: float | None = None
    cached_lowered: float | None = None
    branches: dict[str, int] = field(default_factory=dict)
    sites: int = 0
    share: float = 0.0
    ungated: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    refused: list[list[str]] = field(default_factory=list)
    layers: int = 0
    analysis_seconds: float = 0.0
    seconds: float = 0.0


def main() -> None:
    args = parse_arguments()
    names = args.only.split(",") if args.only else load_builder(args.builder).names()
    warm_up(args)
    found: dict[str, Row] = {}
    for row in sweep(names, args):
        found[row.name] = row
        print(line_of(row), flush=True)
        if args.out:
            # Each time, so that a sweep that is cut off leaves what it found.
            write([found[name] for name in names if name in found], args)
    print(summary([found[name] for name in names], args.cached))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builder", type=Path, required=True, help="Python file that builds tiny models")
    parser.add_argument("--only", help="comma-separated names; all by default")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of lowered against gated")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds an architecture may take")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--experts", help="experts_implementation of mixtures, as transformers names it")
    parser.add_argument("--cached", action="store_true", help="capture with a key-value cache")
    parser.add_argument("--debug", action="store_true", help="print tracebacks of the compiler's own faults")
    return parser.parse_args()


def load_builder(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("tiny_decoders", path)
    if spec is None or spec.loader is None:
        sys.exit(f"zoo: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm_up(args: argparse.Namespace) -> None:
    """Do once what every architecture would do first: import everything and export something."""
    import torch
    from torch import nn

    import dispfx

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load_builder(args.builder)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.up, self.down = nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, ids: Any) -> Any:
            x = self.embedding(ids)
            return (x + self.down(self.up(x).relu())) @ self.embedding.weight.T

    dispfx.capture(Small().eval())


@dataclass
class Running:
    """An architecture in a process of its own."""

    name: str
    process: BaseProcess
    answer: Connection
    deadline: float


def sweep(names: list[str], args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of every architecture, as they end; each is a copy of this process.

    A copy has everything imported already, which takes longer than most architectures do.
    """
    waiting, running = list(names), []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            running.append(started(waiting.pop(0), args))
        first = min(one.deadline for one in running)
        wait([one.answer for one in running], timeout=max(0.0, first - time.monotonic()))
        still = []
        for one in running:
            if one.answer.poll() or time.monotonic() >= one.deadline:
                yield ended(one, args)
            else:
                still.append(one)
        running = still


def started(name: str, args: argparse.Namespace) -> Running:
    context = multiprocessing.get_context("fork")
    answer, ours = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, args, ours))
    process.start()
    ours.close()
    return Running(name, process, answer, time.monotonic() + args.limit)


def work(name: str, args: argparse.Namespace, answer: Connection) -> None:
    if not args.debug:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    answer.send(asdict(examine(name, args)))
    answer.close()


def ended(one: Running, args: argparse.Namespace) -> Row:
    try:
        row = Row(**one.answer.recv()) if one.answer.poll() else None
    except EOFError:
        one.process.join()
        return Row(one.name, "error", f"the process ended with {one.process.exitcode}")
    if row is None:
        one.process.kill()
        row = Row(one.name, "error", f"took longer than {args.limit:g} s")
    one.process.join()
    return row


def examine(name: str, args: argparse.Namespace) -> Row:
    """Run one architecture through the compiler."""
    import torch

    from dispfx.errors import DispfxError, PassError

    row = Row(name)
    start = time.perf_counter()
    try:
        model = build(name, args)
    except Exception as error:
        row.status, row.reason = "not built", f"{type(error).__name__}: {error}"[:300]
        return row
    try:
        model = model.to(getattr(torch, args.dtype))
        if args.cached:
            run_cached(model, row, args.tolerance)
        else:
            compile_tiny(model, row, args.tolerance)
    except PassError as error:
        row.status, row.reason = "error", str(error)[:400]
        traceback.print_exc()
    except DispfxError as error:
        # Where packages lie on this machine is nobody else's business.
        where = (error.where or "").rpartition("site-packages/")[2]
        row.status, row.reason = "refused", f"{error.problem} [{where}]"[:400]
    except Exception as error:
        row.status, row.reason = "error", f"{type(error).__name__}: {error}"[:400]
        traceback.print_exc()
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def build(name: str, args: argparse.Namespace) -> Any:
    """Build with the fastest attention and the experts that the architecture supports."""
    builder = load_builder(args.builder)
    experts = [args.experts] if args.experts else ["batched_mm", None]
    failure: Exception = RuntimeError("nothing was tried")
    for attention in ("sdpa", "eager"):
        for implementation in experts:
            try:
                return builder.build(name, attn=attention, experts=implementation)[0]
            except Exception as error:
                failure = error
    raise failure


def compile_tiny(model: Any, row: Row, tolerance: float) -> None:
    import torch

    from dispfx import api
    from dispfx.api.programs import analysis
    from dispfx.api.verification import ZeroedDecoder, unread_lines, zeroed_tensors
    from dispfx.capturing import capture
    from dispfx.ir.coverage import coverage
    from dispfx.ir.plan import Plan
    from dispfx.pipeline import Pipeline

    program = capture(model)
    row.identity = max(error.relative for error in program.identity.values())
    start = time.perf_counter()
    Pipeline(analysis()).run(program)
    row.analysis_seconds = round(time.perf_counter() - start, 3)
    row.branches = dict(Counter(branch.kind for branch in program.branches))
    row.sites = len(program.sites)
    row.refused = [[refusal.name, refusal.reason] for refusal in program.refused]
    reached = coverage(program)
    row.share, row.ungated, row.beside = round(reached.share, 4), list(reached.ungated), list(reached.beside)
    ones = [torch.ones(site.size) for site in program.sites]
    decoder = api.gate(program)
    vocabulary = program.vocabulary_size
    ids = [torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(7)) for shape in SHAPES]
    twin = other_experts(model, program)
    with torch.no_grad():
        row.bit_identical = all(torch.equal(decoder(x, ones), program.graph_module(x)) for x in ids)
        errors: dict[str, list[float]] = {"lowered": [], "gathered": [], "zeroed": [], "experts": []}
        row.unread = True
        for seed in SEEDS:
            plan = Plan.random(program, RATIO, seed)
            hard = api.gated(program, plan)
            row.unread = row.unread and all(line.holds for line in unread_lines(program, plan, hard))
            forms = {
                "lowered": api.lower(program, plan),
                "gathered": api.lower(program, plan, write="gather-add"),
                "zeroed": ZeroedDecoder(model, zeroed_tensors(program, plan)),
                **({"experts": api.lower(twin, plan)} if twin is not None else {}),
            }
            for x in ids:
                expected = hard(x)
                for name, form in forms.items():
                    errors[name].append(relative(form(x), expected))
    for name, found in errors.items():
        setattr(row, name, max(found) if found else None)
    worst = max(error for found in errors.values() for error in found)
    right = row.bit_identical and row.unread and worst <= tolerance
    row.status = "compiled" if right else "wrong"


def other_experts(model: Any, program: Any) -> Any:
    """Return the capture that learning uses, where it computes experts in another way; its sites agree."""
    from dispfx import api
    from dispfx.ir import ops
    from dispfx.source.experts import has_choice_of_experts

    if not has_choice_of_experts(model):
        return None
    twin = api.capture(model, experts="grouped")
    if not any(ops.is_grouped(node) for node in twin.graph.nodes):
        return None
    if twin.sites != program.sites:
        raise RuntimeError("the two captures of the experts offer different sites")
    return twin


def run_cached(model: Any, row: Row, tolerance: float) -> None:
    import torch

    from dispfx import api
    from dispfx.api.cached import CachedDecoder, capture_cached, lower_cached
    from dispfx.ir.plan import Plan

    plain = api.capture(model, experts="batched")
    program = capture_cached(model)
    row.identity = max(error.relative for error in program.identity.values())
    row.sites = len(program.sites)
    plan = Plan.random(plain, RATIO, SEEDS[0])
    ids = torch.randint(
        4, program.vocabulary_size, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(7)
    )
    with torch.no_grad():
        dense, small = program.graph_module, lower_cached(model, plan).graph_module
        row.cached = relative(step_by_step(CachedDecoder(dense), ids), plain.graph_module(ids))
        row.cached_lowered = relative(step_by_step(CachedDecoder(small), ids), api.gated(plain, plan)(ids))
    row.status = "cached" if max(row.cached, row.cached_lowered) <= tolerance else "wrong"


def step_by_step(decoder: Any, ids: Any) -> Any:
    """Return the logits of a prefill and a decode step for each further token."""
    import torch

    parts = [decoder(ids[:, :PROMPT]), *(decoder(ids[:, at : at + 1]) for at in range(PROMPT, ids.shape[1]))]
    return torch.cat(parts, dim=1)


def relative(actual: Any, expected: Any) -> float:
    """max|a − b| / max|b|; infinite where a value is not finite."""
    a, b = actual.double(), expected.double()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max())


def whole(row: Row) -> bool:
    """Compiled with no refusal and nearly every block weight gated."""
    return row.status == "compiled" and not row.refused and row.share >= REQUIRED_SHARE


def line_of(row: Row) -> str:
    text = f"{row.name:28s} {row.status:9s}"
    if row.cached is not None:
        return f"{text} dense {row.cached:.1e} lowered {row.cached_lowered:.1e} {row.seconds:.1f} s"
    if row.status in ("compiled", "wrong"):
        refused = "; ".join(f"{name}: {reason}" for name, reason in row.refused[:2])
        errors = f"lowered {row.lowered:.1e} zeroed {row.zeroed:.1e}"
        return f"{text} {errors} share {row.share:.3f} {row.branches} {row.seconds:.1f} s {refused}"
    return f"{text} {row.reason}"


def summary(rows: list[Row], cached: bool = False) -> str:
    counts = Counter(row.status for row in rows)
    ends = (
        f"{counts['refused']} refused by name, {counts['not built']} not built, {counts['wrong']} wrong, "
        f"{counts['error']} errors"
    )
    if cached:
        return f"{len(rows)} architectures: {counts['cached']} run with a cache, {ends}"
    equal = sum(row.status == "compiled" and row.identity == 0.0 for row in rows)
    mixtures = sum(row.status == "compiled" and row.experts is not None for row in rows)
    return (
        f"{len(rows)} architectures: {counts['compiled']} compiled "
        f"({sum(map(whole, rows))} with no refusal and at least {REQUIRED_SHARE:.0%} of the block weights "
        f"gated, {equal} captured bit-equal, {mixtures} mixtures of experts lowered by one plan in both "
        f"captures), {ends}"
    )


COLUMNS = "branches | sites | weights gated | identity | lowered = gated | zeroed = gated | experts | seconds"
CACHED_COLUMNS = "sites | identity | cached = recomputed | lowered and cached = gated | seconds"


def write(rows: list[Row], args: argparse.Namespace) -> None:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {args.dtype}"
    title, flag = (" with a key-value cache", " --cached") if args.cached else ("", "")
    columns = CACHED_COLUMNS if args.cached else COLUMNS
    head = [
        f"# Every causal language model of transformers, tiny{title}",
        "",
        f"Made by `tools/zoo.py{flag}` on {time.strftime('%Y-%m-%d')} with {versions}.",
        "",
        summary(rows, args.cached) + ".",
        "",
        f"| architecture | result | {columns} |",
        "|---|---" + "|---" * len(columns.split("|")) + "|",
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.md").write_text("\n".join(head + [cells(row, args.cached) for row in rows]) + "\n")
    Path(f"{args.out}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def cells(row: Row, cached: bool = False) -> str:
    empty = (CACHED_COLUMNS if cached else COLUMNS).count("|")
    if row.status not in ("compiled", "cached", "wrong"):
        reason = row.reason.replace("|", "/").replace("\n", " ").split(" [")[0]
        return f"| {row.name} | {row.status}: {reason} |{' |' * empty} {row.seconds:.1f} |"
    if cached:
        return (
            f"| {row.name} | {row.status} | {row.sites} | {row.identity:.0e} | {row.cached:.0e} | "
            f"{row.cached_lowered:.0e} | {row.seconds:.1f} |"
        )
    branches = ", ".join(f"{count} {kind}" for kind, count in row.branches.items())
    refused = f", {len(row.refused)} refused ({row.refused[0][1]})" if row.refused else ""
    experts = "" if row.experts is None else f"{row.experts:.0e}"
    return (
        f"| {row.name} | {row.status}{refused} | {branches} | {row.sites} | {row.share:.1%} | "
        f"{row.identity:.0e} | {row.lowered:.0e} | {row.zeroed:.0e} | {experts} | {row.seconds:.1f} |"
    )


if __name__ == "__main__":
    main()
