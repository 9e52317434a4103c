#!/usr/bin/env python3
"""Measure ONNX models of a decoder's shape, dense and pruned, without its weights.

Builds a few layers of the shape with random weights, prunes them by random plans, exports dense and pruned
the same way, checks that ONNX Runtime gives what PyTorch gives on the same device, and times prefill and
decode.  Writes bench_onnx.json and bench_onnx.md into the folder given, after every row.
"""

import argparse
import dataclasses
import gc
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from kernels import kernels_of
from onnx_placement import read_placement
from onnx_timing import time_session
from transformers import LlamaConfig, LlamaForCausalLM

from dispfx.benchmark.bound import bound, step_cost
from dispfx.benchmark.onnx_comparison import bound_run
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.pipelines import run_pipeline
from dispfx.compiler.programs import lower_program
from dispfx.deploy.onnx.exporting import cached_model
from dispfx.deploy.onnx.files import save_model
from dispfx.deploy.onnx.session import CachedSession, SessionOptions
from dispfx.deploy.onnx.skip_norms import fuse_skip_norms
from dispfx.ir.cached_inputs import CachedShape, sample_inputs
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.fuse_projections import FuseProjections
from dispfx.plan.plan import Plan
from dispfx.verification.equivalence import compare

# width, inner width, heads, key-value heads
SHAPES = {
    "7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
    "8b-grouped": (4096, 14336, 32, 8),
    "tiny": (64, 160, 4, 2),
}
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
CHECKED = (CachedShape(2, 9, 7), CachedShape(1, 17, 0), CachedShape(1, 1, 31))


def plain(model: ir.Model) -> None:
    """Leave the model as the compiler exports it."""


def unpadded(model: ir.Model) -> None:
    """Leave masks out, as for texts without padding."""
    for node in attentions(model):
        if "is_causal" in node.attributes and node.attributes["is_causal"].as_int():
            node.replace_input_with(3, None)
    common.RemoveUnusedNodesPass()(model)


def fused(model: ir.Model) -> None:
    """Use ONNX Runtime's own operators."""
    fuse_skip_norms(model)


def unpadded_fused(model: ir.Model) -> None:
    """Do both."""
    unpadded(model)
    fused(model)


VARIANTS: dict[str, Callable[[ir.Model], None]] = {
    "plain": plain,
    "unpadded": unpadded,
    "ort-fusions": fused,
    "unpadded-ort-fusions": unpadded_fused,
}


def attentions(model: ir.Model) -> list[ir.Node]:
    """Return the Attention nodes of a model."""
    return [node for node in model.graph if node.op_type == "Attention"]


Limits = Callable[[CachedShape], float]


class OutOfTime(Exception):
    """The budget is used up."""


class Results:
    """Rows and notes, written after every one of them."""

    def __init__(self, folder: Path, budget_seconds: float, facts: dict[str, Any]):
        self.folder, self.facts = folder, facts
        self.ends = time.monotonic() + budget_seconds
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def check_time(self) -> None:
        """Raise `OutOfTime` once the budget is used up."""
        if time.monotonic() > self.ends:
            raise OutOfTime

    def note(self, text: str) -> None:
        """Keep and print a line."""
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def add(self, row: dict[str, Any]) -> None:
        """Keep and print a row."""
        self.rows.append(row)
        self.write()
        shown = {name: value for name, value in row.items() if name not in ("kernels", "shape", "cpu_nodes")}
        print(" ".join(f"{name}={_short(value)}" for name, value in shown.items()), flush=True)

    def write(self) -> None:
        """Write both files."""
        content = {"facts": self.facts, "rows": self.rows, "notes": self.notes}
        (self.folder / "bench_onnx.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        (self.folder / "bench_onnx.md").write_text(self._markdown(), encoding="utf-8")

    def _markdown(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in self.facts.items()), ""]
        names = [
            "dtype",
            "variant",
            "graph",
            "timing",
            "phase",
            "removed",
            "dense ms",
            "pruned ms",
            "×",
            "bound",
        ]
        names.append("share")
        lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for row in self.rows:
            dense = self._dense(row)
            if row["removed"] == 0.0 or dense is None or "milliseconds" not in row:
                continue
            gain = dense["milliseconds"] / row["milliseconds"]
            lines.append(
                f"| {row['dtype']} | {row['variant']} | {'yes' if row['cuda_graph'] else 'no'} "
                f"| {row['timing']} | {row['phase']} "
                f"| {row['removed']:.3f} | {dense['milliseconds']:.3f} | {row['milliseconds']:.3f} "
                f"| {gain:.2f} | {row['bound']:.2f} | {gain / row['bound']:.0%} |"
            )
        return "\n".join([*lines, "", *self.notes, ""])

    def _dense(self, row: dict[str, Any]) -> dict[str, Any] | None:
        same = ("dtype", "variant", "cuda_graph", "phase", "timing")
        for other in self.rows:
            if other["removed"] == 0.0 and all(other.get(name) == row.get(name) for name in same):
                return other
        return None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass
class Bench:
    """One run of the script."""

    arguments: argparse.Namespace
    results: Results
    work: Path

    def run(self) -> None:
        """Measure every dtype; what fails is noted and the rest goes on."""
        for dtype in self.arguments.dtypes:
            self._guarded(f"{dtype}", lambda dtype=dtype: self._dtype(dtype))

    def _guarded(self, what: str, step: Callable[[], None]) -> None:
        try:
            self.results.check_time()
            step()
        except OutOfTime:
            self.results.note(f"out of time before {what}")
        except Exception as error:
            traceback.print_exc()
            self.results.note(f"FAILED {what}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
        finally:
            gc.collect()
            if self.arguments.device == "cuda":
                torch.cuda.empty_cache()

    def _dtype(self, dtype: str) -> None:
        start = time.monotonic()
        program = self._captured(dtype)
        self.results.note(f"{dtype}: captured on {program.device} in {time.monotonic() - start:.1f} s")
        ratios = (0.0, *self.arguments.ratios)
        exports = [(ratio, False) for ratio in ratios]
        if self.arguments.fused and dtype == self.arguments.dtypes[0]:
            exports += [(ratio, True) for ratio in ratios[:2]]
        for ratio, fused in exports:
            name = f"{dtype}-{ratio}{'-fused' if fused else ''}"

            def step(ratio: float = ratio, fused: bool = fused, name: str = name) -> None:
                self._ratio(program, dtype, ratio, fused, name)

            self._guarded(name, step)

    def _captured(self, dtype: str) -> Program:
        """Return the program, captured on the device, or on the CPU where that fails."""
        model = random_decoder(self.arguments, getattr(torch, dtype))
        try:
            return capture_cached(model)
        except Exception as error:
            if self.arguments.device == "cpu":
                raise
            traceback.print_exc()
            self.results.note(f"FAILED {dtype}: capture on {self.arguments.device}: {str(error)[:300]}")
            return capture_cached(model.cpu())

    def _ratio(self, program: Program, dtype: str, ratio: float, fused: bool, name: str) -> None:
        plan = Plan.random(program, ratio, self.arguments.seed, align=self.arguments.align)
        lowered = lower_program(program, plan)
        counted = lowered.clone()
        lowered = run_pipeline("gather", lowered, row_multiple=self.arguments.rows)
        if fused:
            lowered = Pipeline([FuseProjections()]).run(lowered)
        folder = self.work / name
        folder.mkdir()
        start = time.monotonic()
        model = cached_model(lowered)
        exported = time.monotonic()
        save_model(model, folder / "model.onnx", max_inline_bytes=0)
        del model
        self.results.note(
            f"{name}: {plan.achieved:.4f} removed, exported in {exported - start:.1f} s, "
            f"written in {time.monotonic() - exported:.1f} s"
        )

        def limits(shape: CachedShape) -> float:
            """Return the largest possible speed-up at a shape."""
            costs = [step_cost(one, shape, last_logits=False) for one in (program, counted)]
            return bound(costs[0], costs[1], shape)

        facts = {"dtype": dtype, "ratio": ratio, "removed": round(plan.achieved, 4)}
        first = dtype == self.arguments.dtypes[0] and ratio in (0.0, self.arguments.ratios[0])
        variants = self.arguments.variants if first else self.arguments.variants[: self.arguments.few]
        for variant in ("plain",) if fused else variants:
            row = {**facts, "variant": f"{variant}{'-fused' if fused else ''}"}
            self._guarded(
                f"{name} {variant}",
                lambda variant=variant, row=row: self._variant(lowered, folder, variant, row, limits),
            )
        shutil.rmtree(folder)

    def _variant(
        self, lowered: Program, folder: Path, variant: str, row: dict[str, Any], limits: Limits
    ) -> None:
        path = folder / f"{variant}.onnx"
        model = ir.load(folder / "model.onnx")
        VARIANTS[variant](model)
        ir.save(model, path)
        session = CachedSession(path, SessionOptions(self.arguments.device))
        self._check(session, lowered, variant, row)
        for phase, shape in self._phases():
            self.results.check_time()
            speed = time_session(session, shape, seconds=self.arguments.seconds)
            self._add(row, phase, shape, speed.seconds, speed.queued_seconds, False, limits)
        self._look(session, path, variant, row)
        del session
        gc.collect()
        if self.arguments.device == "cuda" and self.arguments.cuda_graph:
            for phase, shape in self._phases():
                if shape.tokens == 1:
                    self._guarded(
                        f"{row} as a CUDA graph",
                        lambda phase=phase, shape=shape: self._graph(path, row, phase, shape, limits),
                    )

    def _graph(self, path: Path, row: dict[str, Any], phase: str, shape: CachedShape, limits: Limits) -> None:
        session = CachedSession(path, SessionOptions("cuda", cuda_graph=True))
        speed = time_session(session, shape, seconds=self.arguments.seconds)
        self._add(row, phase, shape, speed.seconds, speed.queued_seconds, True, limits)

    def _add(
        self,
        row: dict[str, Any],
        phase: str,
        shape: CachedShape,
        seconds: float,
        queued: float | None,
        graph: bool,
        limits: Limits,
    ) -> None:
        limit = limits(shape)
        shared = {**row, "phase": phase, "shape": list(shape), "cuda_graph": graph, "bound": limit}
        shared["tokens_per_second"] = shape.batch * shape.tokens / seconds
        self.results.add({**shared, "timing": "waited", "milliseconds": seconds * 1e3})
        if queued is not None:
            self.results.add({**shared, "timing": "queued", "milliseconds": queued * 1e3})

    def _phases(self) -> list[tuple[str, CachedShape]]:
        arguments = self.arguments
        phases = [
            (f"prefill 1×{arguments.prefill}", CachedShape(1, arguments.prefill, 0)),
            (f"decode 1 after {arguments.past}", CachedShape(1, 1, arguments.past)),
        ]
        return phases + [
            (f"decode {batch} after {arguments.past}", CachedShape(batch, 1, arguments.past))
            for batch in arguments.batches
        ]

    def _check(self, session: CachedSession, lowered: Program, variant: str, row: dict[str, Any]) -> None:
        """Compare with PyTorch on the same device; a batch with padding too, but for what cannot take one."""
        worst = 0.0
        for shape in CHECKED:
            inputs = sample_inputs(session.caches, shape, session.vocabulary_size, session.device)
            if variant.startswith("unpadded"):
                inputs[1].fill_(1)
            with torch.no_grad():
                expected = lowered.graph_module(*(value.to(lowered.device) for value in inputs))
            actual = session(inputs).values()
            for one, other in zip(expected, actual, strict=True):
                line = compare("onnx = torch", one, other.to(one.device), TOLERANCES[row["dtype"]])
                worst = max(worst, line.max_rel_error)
        tolerance = TOLERANCES[row["dtype"]]
        verdict = "holds" if worst <= tolerance else "DOES NOT HOLD"
        name = f"{row['dtype']} {row['removed']} {row['variant']}"
        self.results.note(f"check {name}: error {worst:.2e}, at most {tolerance:g}: {verdict}")

    def _look(self, session: CachedSession, path: Path, variant: str, row: dict[str, Any]) -> None:
        """Record the kernels of each phase, and which nodes ran on the CPU."""
        if self.arguments.device != "cuda":
            return
        for phase, shape in self._phases()[:2]:
            run = bound_run(session, shape)
            found = kernels_of(run.run)
            total = 1e6 * sum(kernel.seconds for kernel in found)
            self.results.add(
                {
                    **row,
                    "phase": phase,
                    "cuda_graph": False,
                    "timing": "kernels",
                    "kernel_microseconds": total,
                    "kernels": [(one.name, one.calls, 1e6 * one.seconds) for one in found[:24]],
                }
            )
        if variant != "plain":
            return
        profiled = CachedSession(path, SessionOptions("cuda", profile=str(self.work / "profile")))
        bound_run(profiled, self._phases()[1][1]).run()
        bound_run(profiled, self._phases()[1][1]).run()
        placement = read_placement(Path(profiled.session.end_profiling()))
        self.results.add(
            {
                **row,
                "phase": "placement",
                "cuda_graph": False,
                "timing": "placement",
                "nodes": placement.nodes,
                "cpu_nodes": [f"{node.operator} {node.name}" for node in placement.on_cpu],
                "misplaced": [f"{node.operator} {node.name}" for node in placement.misplaced],
                "copies": [node.name for node in placement.copies],
                "copies_inside": [node.name for node in placement.copies_inside],
            }
        )


def random_decoder(arguments: argparse.Namespace, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a decoder of the shape on the device, with random weights."""
    width, inner, heads, groups = SHAPES[arguments.shape]
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=4096,
        dtype=dtype,
    )
    torch.manual_seed(arguments.seed)
    with torch.device(arguments.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def facts_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    import onnxruntime

    cuda = arguments.device == "cuda"
    return {
        "card": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "onnxruntime": onnxruntime.__version__,
        "shape": arguments.shape,
        "layers": arguments.layers,
        "vocabulary": arguments.vocabulary,
        "align": arguments.align,
        "rows": arguments.rows,
        "seed": arguments.seed,
        "at": time.strftime("%Y-%m-%d"),
    }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--work", type=Path, help="folder for models, several GB; a temporary one by default")
    parser.add_argument("--shape", choices=SHAPES, default="13b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--vocabulary", type=int, default=256, help="small, so that layers count (%(default)s)"
    )
    parser.add_argument("--dtypes", nargs="+", choices=TOLERANCES, default=["float16", "bfloat16"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["plain"])
    parser.add_argument(
        "--few", type=int, default=3, help="variants of further ratios and dtypes (%(default)s)"
    )
    parser.add_argument("--fused", action="store_true", help="also with sibling projections fused")
    parser.add_argument("--align", type=int, default=64, help="widths are multiples of this (%(default)s)")
    parser.add_argument(
        "--rows", type=int, default=8, help="written rows are multiples of this (%(default)s)"
    )
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--past", type=int, default=1024)
    parser.add_argument("--batches", nargs="*", type=int, default=[], help="also decode at these batch sizes")
    parser.add_argument("--seconds", type=float, default=1.5, help="of timing a row (%(default)s)")
    parser.add_argument("--cuda-graph", action="store_true", help="also decode as a CUDA graph")
    parser.add_argument("--budget-seconds", type=float, default=540.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    arguments = parse_arguments()
    results = Results(arguments.out, arguments.budget_seconds, facts_of(arguments))
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        Bench(arguments, results, Path(work)).run()
    print((arguments.out / "bench_onnx.md").read_text(encoding="utf-8"))
    failed = [note for note in results.notes if "FAILED" in note or "DOES NOT HOLD" in note]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
