#!/usr/bin/env python
"""Measure what plans are worth: perplexity by recipe, method and ratio, on one decoder and one lowering.

    python tools/quality.py --out DIR                                     the demo and its own text
    python tools/quality.py --model M --data LEARN.txt --split CHOOSE.txt --test TEST.txt --out DIR \\
        --rows informed:0.3 informed:0.3:lr=1e-2,steps=500 sensitivity:0.3 --seeds 0 1

A row is NAME:RATIO[:SETTING=VALUE,…]; NAME is a recipe or a method (`dispfx.settings.learning_settings`).
Plans are learned on --data and the first 80% of --split; its last 20% is what recipes are chosen on, and the
text of --test is not looked at unless it is given.  Every row is written when it is there:
quality.json, quality.md, and of the n-th row, from 0, planN.safetensors and metricsN/metrics.jsonl.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dispfx.compiler.programs import capture, lower
from dispfx.demo.grammar import generate_text
from dispfx.errors import DispfxError
from dispfx.ir.program import Program
from dispfx.learning.records import MetricsLog
from dispfx.learning.trainer import Watch
from dispfx.quality.perplexity import TextFacts, measure
from dispfx.run.fitting import fitted_settings
from dispfx.run.folder_report import device_name, versions
from dispfx.run.mask_learning import batches_of, learn
from dispfx.settings import ComputeSettings, learn_settings
from dispfx.settings.learning_settings import METHOD_ALIASES, RECIPES, LearnSettings, Method
from dispfx.source import Source, encode, load_source, read_text

LEARNED_SHARE = 0.8
ROWS = [f"{name}:{ratio}" for name in ("paper", "informed", "sensitivity", "random") for ratio in (0.3, 0.5)]
_DEMO_CHARACTERS = 1_500_000
_DEMO_SEED = 2024


def main(words: Sequence[str] | None = None) -> int:
    """Run every row; 1 where one has no figures."""
    args = _arguments().parse_args(words)
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Quality(args)
    print(f"dense: {bench.dense}, opened in {time.perf_counter() - began:.0f} s", flush=True)
    whole = True
    for word in args.rows:
        for seed in args.seeds:
            if time.perf_counter() - began > args.budget_seconds:
                print(f"left out for time: {word}, seed {seed}", flush=True)
                whole = False
                continue
            whole &= bench.row(word, seed)
    return 0 if whole else 1


class Quality:
    """One decoder, its texts, and the rows so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        source = load_source(args.model, device=args.device, dtype=args.dtype)
        self.program: Program = capture(source.model)
        self.learned, self.choice, self.test = _texts(source, args)
        self.rows: list[dict[str, Any]] = []
        self.dense = self._perplexities(self.program.graph_module)

    def row(self, word: str, seed: int) -> bool:
        """Learn and measure one row, and write all rows; False where it failed."""
        notes: list[str] = []
        row: dict[str, Any] = {"row": word, "seed": seed, "notes": notes}
        began = time.perf_counter()
        log = self.args.out / f"metrics{len(self.rows)}"
        log.mkdir(exist_ok=True)
        try:
            ratio, chosen = _settings(self.args.model, word, seed)
            settings = fitted_settings(chosen, program=self.program, note=notes.append)
            with MetricsLog(log, 0) as metrics:
                plan = learn(
                    self.program,
                    batches_of(self.learned, settings, self.choice),
                    ratio,
                    align=self.args.align,
                    settings=settings,
                    compute=ComputeSettings(compile=self.args.compile),
                    watch=Watch(on_step=metrics.append, note=notes.append),
                )
            plan.save(self.args.out / f"plan{len(self.rows)}.safetensors")
            row |= {"ratio": ratio, "achieved": plan.achieved, "steps": settings.steps, "seed": settings.seed}
            row |= {"learning_seconds": time.perf_counter() - began}
            row |= self._perplexities(lower(self.program, plan, write="gather-add"))
        except (DispfxError, RuntimeError, IndexError) as error:
            row["error"] = f"{type(error).__name__}: {error}"
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self._write()
        return "error" not in row

    def _perplexities(self, decoder: nn.Module) -> dict[str, float]:
        """Return the perplexity on the text to choose on, and on that to report where there is one."""
        found = {}
        for name, tokens in (("choice", self.choice), ("test", self.test)):
            if tokens is not None:
                result = measure(
                    decoder,
                    tokens,
                    context=self.args.context,
                    device=self.program.device,
                    text=TextFacts(name),
                )
                found[name] = result.value
        return found

    def _write(self) -> None:
        facts = {
            "model": self.args.model,
            "context": self.args.context,
            "learned_tokens": len(self.learned),
            "choice_tokens": len(self.choice),
            "test_tokens": 0 if self.test is None else len(self.test),
            "dense": self.dense,
            "device": device_name(self.program.device),
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
        }
        text = json.dumps({"facts": facts, "rows": self.rows}, indent=1)
        (self.args.out / "quality.json").write_text(text + "\n", encoding="utf-8")
        (self.args.out / "quality.md").write_text(_markdown(facts, self.rows), encoding="utf-8")


def _texts(source: Source, args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tokens to learn from, to choose on, and to report."""
    if args.model == "demo" and not args.data:
        tokens = encode(generate_text(_DEMO_SEED, _DEMO_CHARACTERS), source.tokenizer)
        bounds = int(len(tokens) * 0.9), int(len(tokens) * 0.95)
        return tokens[: bounds[0]], tokens[bounds[0] : bounds[1]], tokens[bounds[1] :]
    if not args.data or not args.split:
        raise DispfxError("--data to learn from and --split to choose on are needed", hint="or --model demo")
    split = read_text(args.split, source.tokenizer).tokens
    bound = int(len(split) * LEARNED_SHARE)
    learned = torch.cat([read_text(args.data, source.tokenizer).tokens, split[:bound]])
    test = read_text(args.test, source.tokenizer).tokens if args.test else None
    return learned, split[bound:], test


def _settings(model: str, word: str, seed: int) -> tuple[float, LearnSettings]:
    """Return ratio and settings of a row.

    Raises:
        DispfxError: if the row is unknown.
    """
    name, _, rest = word.partition(":")
    ratio, _, changes = rest.partition(":")
    methods = {*get_args(Method), *METHOD_ALIASES} - {"learned"}
    if name not in RECIPES and name not in methods:
        raise DispfxError(
            f"a row begins with one of {', '.join([*RECIPES, *sorted(methods)])}, found {name!r}"
        )
    chosen: dict[str, Any] = {"seed": seed} | ({"recipe": name} if name in RECIPES else {"method": name})
    types = {entry.name: type(entry.default) for entry in fields(LearnSettings)}
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        if key not in types or types[key] is tuple:
            raise DispfxError(f"there is no setting {key!r}", where=word)
        if types[key] is bool and value not in ("true", "false"):
            raise DispfxError(f"{key} is true or false, and {value!r} was given", where=word)
        chosen[key] = value == "true" if types[key] is bool else types[key](value)
    try:
        return float(ratio), learn_settings(model, **chosen)
    except ValueError as error:
        raise DispfxError(f"a row is NAME:RATIO[:SETTING=VALUE,…], found {word!r}") from error


def _markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    measured = [name for name in ("choice", "test") if name in facts["dense"]]
    lines = [
        f"{facts['model']}, {facts['device']}, torch {facts['versions']['torch']}, {facts['date']}; "
        f"perplexity in windows of {facts['context']} tokens; "
        f"learned from {facts['learned_tokens']:,} tokens; dense: "
        + ", ".join(f"{name} {facts['dense'][name]:.2f}" for name in measured),
        "",
        "| row | seed | steps | seconds | removed | " + " | ".join(measured) + " |",
        "|---|---|---|---|---|" + "---|" * len(measured),
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['row']} | {row['seed']} | {row['error']} |")
            continue
        values = " | ".join(f"{row[name]:.2f}" if name in row else "not measured" for name in measured)
        lines.append(
            f"| {row['row']} | {row['seed']} | {row['steps']} | {row['learning_seconds']:.0f} | "
            f"{row['achieved']:.4f} | {values} |"
        )
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for quality.json and quality.md")
    add("--model", default="demo", help="as for `dispfx compile`")
    add("--data", nargs="*", default=[], help="texts to learn from")
    add("--split", help="text to split: learn from the first 80%%, and choose on the rest")
    add("--test", help="text to report; looked at once")
    add("--rows", nargs="+", default=ROWS)
    add("--seeds", nargs="+", type=int, default=[0])
    add("--align", type=int, default=1)
    add("--context", type=int, default=2048, help="tokens a window of perplexity (2048; demo: 256 is most)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", help="of the weights")
    add("--compile", choices=("auto", "on", "off"), default="auto")
    add("--budget-seconds", type=float, default=math.inf, help="no row begins after that")
    return parser


if __name__ == "__main__":
    sys.exit(main())
