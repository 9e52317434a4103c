#!/usr/bin/env python
"""Make the tables of the paper (DISP-LLM, arXiv 2410.11988) on one decoder, one command each.

    python tools/reproduce.py ratio --out DIR                       perplexity against ratio, on the demo
    python tools/reproduce.py seeds curves --out DIR                two of them
    python tools/reproduce.py all --out DIR --steps 200             all of them, with fewer steps
    python tools/reproduce.py all --render --out DIR                the pages again, of the runs so far
    python tools/reproduce.py ratio --model FILE.gguf --data LEARN --eval-data TEST --device cuda --out DIR

A table is DIR/TABLE.md, .json and, for a curve, .png; DIR/tables.md has all that were made in DIR.  Runs are
kept in DIR/runs and shared by the tables, so an interrupted command continues where it stopped.  Missing runs
are marked; for a decoder of the paper, the paper's figure is next to ours.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from reproduction.cells import Content, Options
from reproduction.others import OTHERS
from reproduction.runs import Bench, Common
from reproduction.tables import RUN_TABLES

from dispfx.errors import DispfxError
from dispfx.files.disk import replacing

TABLES = [*RUN_TABLES, *OTHERS]
PAGE_FILE = "tables.md"


def main(words: Sequence[str] | None = None) -> int:
    """Make the tables asked for; 2 for wrong arguments, 1 where a run failed."""
    args = _arguments().parse_args(words)
    names = TABLES if "all" in args.tables else list(dict.fromkeys(args.tables))
    try:
        bench = Bench(_common(args), args.out, 0.0 if args.render else args.budget_seconds)
        for name in names:
            content = _fill(name, bench, _options(args))
            _write(name, content, bench)
            print(f"{name}: {args.out / f'{name}.md'}", flush=True)
    except DispfxError as error:
        print(f"tools/reproduce.py: {error}", file=sys.stderr)
        return 2
    for run, failure in bench.failures.items():
        print(f"failed: {run}: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


def _fill(name: str, bench: Bench, options: Options) -> Content:
    if name in RUN_TABLES:
        return RUN_TABLES[name].fill(name, bench, options)
    return OTHERS[name][1](name, bench, options)


def _title(name: str) -> str:
    return RUN_TABLES[name].title if name in RUN_TABLES else OTHERS[name][0]


def _write(name: str, content: Content, bench: Bench) -> None:
    """Write one table in its forms, and the page of all that are there."""
    out = bench.out
    if content.picture is not None:
        with replacing(out / f"{name}.png") as partial:
            partial.write_bytes(content.picture.png)
    plain: dict[str, Any] = {
        "title": _title(name),
        "header": list(content.header),
        "rows": [list(row) for row in content.rows],
        "notes": list(content.notes),
        "picture": None if content.picture is None else content.picture.alt,
    }
    _write_text(out / f"{name}.json", json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    _write_text(out / f"{name}.md", _markdown(name, plain, bench))
    made = [
        json.loads((out / f"{one}.json").read_text("utf-8")) if (out / f"{one}.json").is_file() else None
        for one in TABLES
    ]
    parts = [_section(one, found) for one, found in zip(TABLES, made, strict=True) if found is not None]
    _write_text(
        out / PAGE_FILE,
        "\n".join([f"# Tables of the paper, on {bench.facts['model']}\n", _made(bench), *parts]),
    )


def _markdown(name: str, plain: dict[str, Any], bench: Bench) -> str:
    return _section(name, plain) + "\n" + _made(bench)


def _section(name: str, plain: dict[str, Any]) -> str:
    header = plain["header"]
    lines = [f"## {plain['title']}\n", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in plain["rows"]]
    lines += [f"\n{note}" for note in plain["notes"]]
    if plain["picture"]:
        lines.append(f"\n![{plain['picture']}]({name}.png)")
    return "\n".join(lines) + "\n"


def _made(bench: Bench) -> str:
    """Say how the figures came about."""
    facts, settings = bench.facts, bench.facts["settings"]
    libraries = facts["versions"]
    size = f"{settings['batch_size']} × {settings['seq_len']}"
    windows = "all windows" if facts["windows"] is None else f"the first {facts['windows']} windows"
    return (
        f"Made on {facts['date']} on {facts['device']}, {facts['dtype']}, torch {libraries['torch']}, by "
        f"`tools/reproduce.py`. Where nothing else stands: {settings['steps']:,} steps of {size} tokens, "
        f"learning rate {settings['lr']:g} ({settings['schedule']}), "
        f"weight decay {settings['weight_decay']:g}, λ {settings['lambda_']:g}, "
        f"{settings['samples']} masks a step{_drawn(settings)}, "
        f"start {settings['start']}, seed 0, widths multiples of {facts['align']}. Learned from "
        f"{facts['texts'][0]} ({facts['tokens'][0]:,} tokens); perplexity on {windows} of {facts['context']} "
        f"tokens of {facts['measured'][0]}, which is never learned from; dense "
        f"{bench.dense.perplexity[0]:.3f}. {bench.common.remark}".rstrip()
        + "\n"
    )


def _drawn(settings: Mapping[str, Any]) -> str:
    """Say how masks are drawn where that is not the plainest way."""
    pairs = " in opposite pairs" if settings["antithetic"] else ""
    return pairs + (f", sharpened up to {settings['sharpen']:g}" if settings["sharpen"] != 1 else "")


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _common(args: argparse.Namespace) -> Common:
    settings = {"steps": args.steps, "batch_size": args.batch_size, "seq_len": args.seq_len, "lr": args.lr}
    settings |= {"weight_decay": args.weight_decay, "schedule": args.schedule}
    return Common(
        args.model,
        tuple(args.data),
        tuple(args.other_data),
        tuple(args.eval_data),
        args.device,
        args.dtype,
        args.recipe,
        {key: value for key, value in settings.items() if value is not None},
        args.align,
        args.context,
        args.windows,
        args.compile,
        args.remark,
    )


def _options(args: argparse.Namespace) -> Options:
    return Options(
        args.ratio,
        tuple(args.ratios),
        tuple(args.lambdas),
        tuple(args.seeds),
        args.price,
        tuple(args.prompts),
        tuple(args.tasks),
        args.task_folder,
        args.task_limit,
    )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    usual = Options()
    add("tables", nargs="+", metavar="TABLE", choices=[*TABLES, "all"], help=", ".join([*TABLES, "all"]))
    add("--out", type=Path, required=True, help="folder for the tables and their runs")
    add("--model", default="demo", help="as for `dispfx compile`")
    add("--data", nargs="*", default=[], help="texts to learn from; the demo brings its own")
    add("--other-data", nargs="*", default=[], help="a second text, for the tables of two texts")
    add("--eval-data", nargs="*", default=[], help="text to measure on (the last tenth of the data)")
    add("--recipe", choices=("paper", "informed"), help="defaults of learning (informed)")
    add("--steps", type=int, help="of learning (the recipe's)")
    add("--batch-size", type=int)
    add("--seq-len", type=int)
    add("--lr", type=float)
    add("--weight-decay", type=float)
    add("--schedule", choices=("constant", "cosine"))
    add("--ratio", type=float, default=usual.ratio, help="of the tables with one ratio (%(default)s)")
    add("--ratios", type=float, nargs="+", default=usual.ratios)
    add("--lambdas", type=float, nargs="+", default=usual.lambdas)
    add("--seeds", type=int, nargs="+", default=usual.seeds)
    add("--prompts", nargs="*", default=[], help="of the generation samples")
    add("--tasks", nargs="+", default=[], help="of lm-eval (the paper's five; for the demo, its own skills)")
    add("--task-folder", help="folder with your own task files, if lm-eval's data cannot be reached")
    add("--task-limit", type=int, help="questions of each task at most (all)")
    add("--price", type=float, help="dollars for one device for one hour")
    add("--align", type=int, default=1, help="widths become multiples of this (%(default)s)")
    add("--context", type=int, help="tokens a window of perplexity (2048; demo: 256)")
    add("--windows", type=int, help="windows of perplexity on each text (all)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="of the weights")
    add("--compile", choices=("auto", "on", "off"), default="auto")
    add("--budget-seconds", type=float, default=math.inf, help="no run begins after that")
    add("--remark", default="", help="a sentence on how the runs were made, for the pages")
    add("--render", action="store_true", help="learn nothing; make the pages from the runs that are there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
