#!/usr/bin/env python3
"""Write pruned folders of tiny models of many architectures, and read them back in fresh processes.

    python tools/huggingface.py --builder PATH/tiny_decoders.py --out docs/huggingface-zoo
    python tools/huggingface.py --builder PATH/tiny_decoders.py --only llama,gpt2

Architectures run in groups: one process prunes and writes each of a group by a random plan, another one,
which has seen nothing of the first, loads the folders with `AutoModelForCausalLM.from_pretrained`.  The
builder is a Python file with `names()` and `build(name, attn=..., experts=...) -> (module, config)`.

Writes OUT.md and OUT.json after every group.  A row holds when the reloaded logits are the written model's
bit for bit, and those are within --tolerance (relative) of the lowered graph and of the dense decoder
with its removed weights set to zero.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RATIO = 0.3
SHAPES = ((2, 9), (1, 17))


@dataclass
class Row:
    """What one architecture did.

    `size` is the share of the stored tensor bytes over kept weights, the rest and indices.
    """

    name: str
    status: str = "error"
    reason: str = ""
    lowered: float | None = None
    zeroed: float | None = None
    reloaded_equal: bool | None = None
    class_kept: bool | None = None
    size: float | None = None
    selects: int = 0
    reads: int = 0
    writes: int = 0
    seconds: float = 0.0


def main() -> None:
    args = parse_arguments()
    if args.write:
        for name in args.only.split(","):
            print(json.dumps(asdict(written(name, args))), flush=True)
        return
    if args.read:
        for name in args.only.split(","):
            print(json.dumps({"name": name, **reloaded(args.read / name)}), flush=True)
        return
    names = args.only.split(",") if args.only else load_builder(args.builder).names()
    start, rows = time.perf_counter(), []
    for first in range(0, len(names), args.group):
        if time.perf_counter() - start > args.budget_seconds:
            break
        for row in run_group(names[first : first + args.group], args):
            rows.append(row)
            print(line_of(row), flush=True)
        if args.out:
            write_table(rows, args)
    print(summary(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--builder", type=Path, required=True, help="Python file that builds tiny models")
    parser.add_argument("--only", help="comma-separated names; all by default")
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative, of float32 logits")
    parser.add_argument("--group", type=int, default=8, help="architectures a process")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a group may take")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="start no group after this")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def load_builder(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("tiny_decoders", path)
    if spec is None or spec.loader is None:
        sys.exit(f"huggingface: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_group(names: list[str], args: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rows = {entry["name"]: Row(**entry) for entry in worker("--write", folder, names, args)}
        done = [name for name, row in rows.items() if row.status == "written"]
        for entry in worker("--read", folder, done, args) if done else []:
            row = rows[entry["name"]]
            row.reloaded_equal, row.class_kept = entry["equal"], entry["class_kept"]
            row.reason = entry["reason"]
            right = row.reloaded_equal and row.class_kept and within(row, args.tolerance)
            row.status = "holds" if right else "wrong"
    return [rows.get(name, Row(name, reason="its process ended early")) for name in names]


def worker(role: str, folder: str, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--builder", str(args.builder), role, folder]
    try:
        done = subprocess.run(
            [*command, "--only", ",".join(names)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=args.limit,
            check=False,
        )
        printed = done.stdout
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def within(row: Row, tolerance: float) -> bool:
    return max(row.lowered or 0.0, row.zeroed or 0.0) <= tolerance


def written(name: str, args: argparse.Namespace) -> Row:
    """Prune one architecture by a random plan and write its checkpoint."""
    import torch

    from dispfx.errors import DispfxError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row, start = Row(name), time.perf_counter()
    try:
        prune(build(name, args), row, args.write / name)
    except DispfxError as error:
        row.status, row.reason = "refused", f"{error.problem}"[:300]
    except Exception as error:
        row.status, row.reason = "error", f"{type(error).__name__}: {error}"[:300]
    row.seconds = round(time.perf_counter() - start, 1)
    return row


def build(name: str, args: argparse.Namespace) -> Any:
    """Build with the fastest attention and the experts that can be analysed, where there are any."""
    builder = load_builder(args.builder)
    failure: Exception = RuntimeError("nothing was tried")
    for attention in ("sdpa", "eager"):
        for experts in ("batched_mm", None):
            try:
                return builder.build(name, attn=attention, experts=experts)[0]
            except Exception as error:
                failure = error
    raise failure


def prune(model: Any, row: Row, folder: Path) -> None:
    import torch

    from dispfx import api
    from dispfx.analysis.label_map import Mismatch
    from dispfx.capturing.module_capture import module_logits
    from dispfx.deploy.checkpoint import StoredDecoder, write_checkpoint
    from dispfx.deploy.section import ModelFiles
    from dispfx.plan.plan import Plan
    from dispfx.run.decoder_files import modules_of
    from dispfx.verification.equivalence import ModuleDecoder
    from dispfx.verification.graphs import module_lines, zeroed_tensors

    program = api.capture(model)
    plan = Plan.random(program, RATIO, 1)
    lowered = api.lower(program, plan)
    pruned = modules_of(program, plan, model, lowered, model.config)
    if isinstance(pruned, Mismatch):
        row.status, row.reason = "graph", pruned.reason[:300]
        return
    lines = module_lines(program, lowered, pruned.model)
    row.lowered = max(line.max_rel_error for line in lines)
    zeroed = ModuleDecoder(model, zeroed_tensors(program, plan))
    ids = [ids_of(program.vocabulary_size, shape) for shape in SHAPES]
    with torch.no_grad():
        logits = [module_logits(pruned.model, x) for x in ids]
        row.zeroed = max(relative(a, zeroed(x)) for a, x in zip(logits, ids, strict=True))
    folder.mkdir(parents=True)
    stored = StoredDecoder(pruned.stored_parameters(), pruned.stored_buffers(), pruned.layout)
    write_checkpoint(folder, ModelFiles(model.config, type(model).__name__), stored, plan, program.sites)
    torch.save({"ids": ids, "logits": logits, "class": type(model).__name__}, folder / "expected.pt")
    row.size = size_share(folder, lowered)
    layouts = pruned.layout.modules.values()
    row.selects = sum(layout.select is not None for layout in layouts)
    row.reads = sum(layout.read is not None for layout in layouts)
    row.writes = sum(layout.write is not None for layout in layouts)
    row.status = "written"


def size_share(folder: Path, lowered: Any) -> float:
    """Return the stored bytes of weights and indices over those that the lowered graph needs."""
    from dispfx.deploy import weights

    headers = weights.read_headers(folder)
    index_bytes = sum(
        header.size * header.dtype.itemsize for name, header in headers.items() if weights.is_index(name)
    )
    stored = sum(header.size * header.dtype.itemsize for header in headers.values() if header.is_parameter)
    kept = sum(parameter.nbytes for parameter in lowered.parameters())
    return round((stored + index_bytes) / (kept + index_bytes), 4)


def reloaded(folder: Path) -> dict[str, Any]:
    """Load a folder as a user would, and compare bits."""
    import torch
    from transformers import AutoModelForCausalLM

    import dispfx  # noqa: F401 - lets transformers load the folder

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    try:
        from dispfx.capturing.module_capture import module_logits
        from dispfx.deploy.checkpoint import implementations

        # Experts that are computed in another way give other bits.
        model = AutoModelForCausalLM.from_pretrained(folder, **implementations(folder))
        with torch.no_grad():
            equal = [
                torch.equal(module_logits(model, x), logits)
                for x, logits in zip(expected["ids"], expected["logits"], strict=True)
            ]
        same = type(model).__name__ == expected["class"]
        return {"equal": all(equal), "class_kept": same, "reason": ""}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        return {"equal": False, "class_kept": False, "reason": reason}


def ids_of(vocabulary: int, shape: tuple[int, int]) -> Any:
    import torch

    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(7))


def relative(actual: Any, expected: Any) -> float:
    """max|a − b| / max|b|; infinite where a value is not finite."""
    a, b = actual.double(), expected.double()
    if not bool(a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max() / b.abs().max())


def line_of(row: Row) -> str:
    if row.lowered is None or row.zeroed is None:
        return f"{row.name:26s} {row.status:8s} {row.reason}"
    return (
        f"{row.name:26s} {row.status:8s} lowered {row.lowered:.0e} zeroed {row.zeroed:.0e} "
        f"bits {row.reloaded_equal} size {row.size} "
        f"{row.selects}/{row.reads}/{row.writes} {row.seconds:.0f} s {row.reason}"
    )


def summary(rows: list[Row]) -> str:
    counts = Counter(row.status for row in rows)
    return (
        f"{len(rows)} architectures: {counts['holds']} load with from_pretrained and hold, "
        f"{counts['graph']} are kept as a graph, {counts['refused']} are refused by the compiler, "
        f"{counts['wrong']} wrong, {counts['error']} errors"
    )


def write_table(rows: list[Row], args: argparse.Namespace) -> None:
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
    head = [
        "# Architectures that load with from_pretrained, tiny",
        "",
        f"Made by `tools/huggingface.py` on {time.strftime('%Y-%m-%d')} with {versions}.",
        "",
        summary(rows) + ".",
        "",
        "`=` means that the logits of the folder, loaded in a fresh process, are bit-identical to those of",
        "the written model. Errors are relative. Size: stored bytes over kept weights, the rest and indices.",
        "Modules: norms that select / modules that read / modules that write among zeros.",
        "",
        "| architecture | result | reloaded | to the lowered | to the zeroed decoder | size | modules |",
        "|---|---|---|---|---|---|---|",
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{args.out}.md").write_text("\n".join(head + [cells(row) for row in rows]) + "\n")
    Path(f"{args.out}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def cells(row: Row) -> str:
    if row.lowered is None or row.zeroed is None:
        reason = row.reason.replace("|", "/").replace("\n", " ")
        return f"| {row.name} | {row.status}: {reason} | | | | | |"
    bits = "=" if row.reloaded_equal else f"differs {row.reason}".strip()
    return (
        f"| {row.name} | {row.status} | {bits} | {row.lowered:.0e} | {row.zeroed:.0e} | {row.size:.3f} | "
        f"{row.selects} / {row.reads} / {row.writes} |"
    )


if __name__ == "__main__":
    main()
