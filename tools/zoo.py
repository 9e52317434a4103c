#!/usr/bin/env python3
"""Sweep tiny models of every causal language model that transformers registers.

    python tools/zoo.py --builder PATH/tiny_decoders.py --out docs/zoo            every architecture
    python tools/zoo.py --builder PATH/tiny_decoders.py --out docs/zoo --cached   with a key-value cache
    python tools/zoo.py --builder PATH/tiny_decoders.py --only llama,gpt2 --dtype bfloat16

Each architecture runs in a process of its own with a time limit: it is captured, analysed, gated with
random plans of 30 %, lowered, and compared at two shapes that were not traced.  The builder is a Python
file with `names()` and `build(name, attn=..., experts=...) -> (module, config)`.

Writes OUT.md and OUT.json: a section for each kind of sweep; this run writes one of them.  With
--resume, architectures that its section already has from these libraries and this state of the compiler
are left out, so a sweep may be done in parts.  An architecture counts as compiled when the gated graph
with masks of ones is bit-identical to the captured one, the captured one is within 1e-6 of the module,
the lowered decoder and the module with zeros for what was removed are within --tolerance of the gated one
at every shape, and noise in place of what was removed changes no bit of the gated one.  A mixture of
experts is captured in both ways, and the plan of one must lower the other.

With --cached each architecture is captured with a key-value cache instead, and a prefill of 12 tokens and 20
decode steps must give what one pass over the 32 tokens gives, dense and lowered.
"""

import argparse
import importlib.util
import multiprocessing
import os
import platform
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from zoo_page import (
    Row,
    Section,
    origin,
    read_sections,
    state_of_compiler,
    summary,
    with_rows,
    write_sections,
)

RATIO = 0.3
SEEDS = (1, 2)
SHAPES = ((2, 9), (1, 17))
PROMPT, STEPS = 12, 20
TOLERANCES = {"float32": 1e-4, "bfloat16": 2**-6}


def main() -> None:
    args = parse_arguments()
    names = args.only.split(",") if args.only else load_builder(args.builder).names()
    made = made_with()
    sections = read_sections(Path(f"{args.out}.json")) if args.out else {}
    mine = Section(args.cached, args.dtype, args.tolerance, {})
    if args.resume and args.section in sections:
        known = sections[args.section].rows
        names = [name for name in names if name not in known or not is_made(known[name], made)]
    warm_up(args)
    found: list[Row] = []
    for row in sweep(names, args):
        row.made = {"date": time.strftime("%Y-%m-%d"), **made}
        found.append(row)
        print(line_of(row), flush=True)
        if args.out:
            # Each time, so that a sweep that is cut off leaves what it found.
            sections = with_rows(sections, args.section, replace(mine, rows={row.name: row}))
            write_sections(sections, args.out)
    print(summary(found, args.cached))


def made_with() -> dict[str, str]:
    """Return the libraries and the state of the compiler that make a row what it is."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "compiler": state_of_compiler(Path(__file__).resolve().parents[1]),
    }


def is_made(row: Row, made: dict[str, str]) -> bool:
    """Whether a row need not be made again: an error may be the machine's."""
    return row.status != "error" and origin(row) == made


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builder", type=Path, required=True, help="Python file that builds tiny models")
    parser.add_argument("--only", help="comma-separated names; all by default")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--tolerance", type=float, help="of lowered against gated; 1e-4, or 2⁻⁶ in bfloat16, by default"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds an architecture may take")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--experts", help="experts_implementation of mixtures, as transformers names it")
    parser.add_argument("--cached", action="store_true", help="capture with a key-value cache")
    parser.add_argument("--heads", action="store_true", help="prune key/value heads, too")
    parser.add_argument("--values", action="store_true", help="prune features of values, too")
    parser.add_argument("--section", help="title of the rows in OUT; by dtype and cache by default")
    parser.add_argument("--resume", action="store_true", help="leave out what OUT already has")
    parser.add_argument("--debug", action="store_true", help="print tracebacks of the compiler's own faults")
    args = parser.parse_args()
    args.tolerance = args.tolerance or TOLERANCES[args.dtype]
    args.section = args.section or args.dtype + (" with a key-value cache" if args.cached else "")
    asked = {"heads": args.heads, "attention-values": args.values}
    args.sites = tuple(word for word, given in asked.items() if given)
    args.section += f", {' and '.join(args.sites)} too" if args.sites else ""
    return args


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
    _renew_threads()
    answer.send(asdict(examine(name, args)))
    answer.close()


def _renew_threads() -> None:
    """Let torch replace the threads that a fork has lost, before two threads try to do so at once.

    Whichever thread first sets its number of threads replaces the pool; where autograd's threads did, one of
    them could find none, "Invalid thread pool!", and the process ended with signal 6.
    """
    import torch

    torch.set_num_threads(1)


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
            run_cached(model, row, args.tolerance, args.sites)
        else:
            compile_tiny(model, row, args.tolerance, args.sites)
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


def compile_tiny(model: Any, row: Row, tolerance: float, sites: tuple[str, ...]) -> None:
    import torch

    from dispfx import api
    from dispfx.analysis.coverage import coverage
    from dispfx.capturing.module_capture import capture
    from dispfx.compiler.pipelines import run_pipeline
    from dispfx.plan.plan import Plan
    from dispfx.verification.graphs import unread_lines, zeroed_decoder

    program = capture(model)
    row.identity = max(error.relative for error in program.identity.values())
    start = time.perf_counter()
    run_pipeline("analyse", program, sites=sites)
    row.analysis_seconds = round(time.perf_counter() - start, 3)
    row.branches = dict(Counter(branch.kind for branch in program.branches))
    row.sites = len(program.sites)
    row.heads, row.values = (sum(site.kind == kind for site in program.sites) for kind in ("heads", "values"))
    row.own_experts = sum(site.is_stacked for site in program.sites)
    row.refused = [[refusal.name, refusal.reason] for refusal in program.refused]
    reached = coverage(program)
    row.share = round(reached.share, 4)
    row.not_gated = {one.reason: round(one.size / reached.total, 6) for one in reached.ungated}
    if reached.gated + sum(one.size for one in reached.ungated) != reached.total:
        raise RuntimeError("some block weights are neither gated nor left out for a reason")
    ones = [torch.ones(site.size) for site in program.sites]
    decoder = api.gate(program)
    vocabulary = program.vocabulary_size
    ids = [torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(7)) for shape in SHAPES]
    twin = other_experts(model, program, sites)
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
                "zeroed": zeroed_decoder(program, plan, model),
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


def other_experts(model: Any, program: Any, sites: Any) -> Any:
    """Return the capture that learning uses, where it computes experts in another way; its sites agree."""
    from dispfx import api
    from dispfx.ir import ops
    from dispfx.source.experts import has_choice_of_experts

    if not has_choice_of_experts(model):
        return None
    twin = api.capture(model, experts="grouped", sites=sites)
    if not any(ops.is_grouped(node) for node in twin.graph.nodes):
        return None
    if twin.sites != program.sites:
        raise RuntimeError("the two captures of the experts offer different sites")
    return twin


def run_cached(model: Any, row: Row, tolerance: float, sites: Any) -> None:
    import torch

    from dispfx import api
    from dispfx.compiler.cached_programs import capture_cached, lower_cached
    from dispfx.ir.cached_inputs import CachedDecoder
    from dispfx.plan.plan import Plan

    plain = api.capture(model, experts="batched", sites=sites)
    program = capture_cached(model, sites=sites)
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


def line_of(row: Row) -> str:
    text = f"{row.name:28s} {row.status:9s}"
    if row.cached is not None:
        return f"{text} dense {row.cached:.1e} lowered {row.cached_lowered:.1e} {row.seconds:.1f} s"
    if row.status in ("compiled", "wrong"):
        refused = "; ".join(f"{name}: {reason}" for name, reason in row.refused[:2])
        errors = f"lowered {row.lowered:.1e} zeroed {row.zeroed:.1e}"
        return f"{text} {errors} share {row.share:.3f} {row.branches} {row.seconds:.1f} s {refused}"
    return f"{text} {row.reason}"


if __name__ == "__main__":
    main()
