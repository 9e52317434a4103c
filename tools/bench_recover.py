#!/usr/bin/env python3
"""Measure what recovery is worth: none, scales and weights at several ratios of one decoder.

    python tools/bench_recover.py --model MODEL --data LEARN.txt --test TEST.txt --second OTHER.txt \\
        --device cuda --out OUT
    python tools/bench_recover.py --model MODEL … --plans 0.3=plan30.safetensors 0.5=plan50.safetensors
    python tools/bench_recover.py --model demo --data a.txt --test b.txt --second c.txt --out OUT \\
        --ratios 0.3 --learn-steps 3 --steps 4 --batch-size 2 --seq-len 32 --windows 2

A plan is learned for each ratio, unless --plans names one, and applied once; each kind of recovery begins
with that folder.  `control` is the dense decoder tuned by cross entropy on --data, for as many steps as
weights are: what the style of that text is worth.  Nothing learns from --test or --second: what training
holds out is the end of --data.  A row has perplexity, KL(dense ‖ pruned) per token and top-1 agreement on
both texts, tokens learned from and seconds.  recover.json and recover.md are written after every row; folders
stay in --out, and a row whose folder is there is not trained again.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from control_row import Control

from dispfx import api
from dispfx.errors import DispfxError
from dispfx.files.disk import replacing
from dispfx.learning.objective import OBJECTIVES
from dispfx.report import NullObserver, load_report
from dispfx.run.folder_report import device_name, versions
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.sections import ModelSettings, TextSettings

KINDS = ("dense", "none", "scales", "weights", "control")
TEXTS = ("test", "second")


def main(words: Sequence[str] | None = None) -> int:
    """Run every row; 1 where one has no figures."""
    args = _arguments().parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    if "dense" in args.kinds:
        bench.dense()
    whole = True
    for ratio in args.ratios:
        for kind in args.kinds:
            if kind not in ("dense", "control"):
                whole &= bench.row(ratio, kind)
    if "control" in args.kinds:
        bench.control()
    return 0 if whole else 1


class Notes(NullObserver):
    """Prints notes and, now and then, how far a run is."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def note(self, text: str) -> None:
        """Print the line."""
        print(f"  {text}", flush=True)

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        """Print a line every ten seconds."""
        if time.monotonic() - self._shown > 10 or done == total:
            self._shown = time.monotonic()
            print(f"  {name} {done}/{total}  {figures}", flush=True)


class Bench:
    """One decoder, its texts, and the rows so far."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.plans = dict(plan.split("=", 1) for plan in args.plans)
        self.rows: list[dict[str, Any]] = []
        self.opened = {"device": args.device, **({"dtype": args.dtype} if args.dtype else {})}

    def dense(self) -> None:
        """Measure the dense decoder's perplexity."""
        row: dict[str, Any] = {"removed": 0.0, "recover": "dense"}
        for name in TEXTS:
            row[name] = {"perplexity": self._perplexity(self.args.model, name), "kl": 0.0, "top1": 1.0}
        self._add(row)

    def row(self, ratio: float, kind: str) -> bool:
        """Make and measure one folder, and write all rows; False where it failed."""
        row: dict[str, Any] = {"removed": ratio, "recover": kind}
        began = time.perf_counter()
        try:
            pruned = self._pruned(ratio)
            folder = pruned if kind == "none" else self._recovered(pruned, kind, ratio)
            row["seconds"] = time.perf_counter() - began
            row |= _facts(folder)
            for name in TEXTS:
                row[name] = self._measured(folder, name)
        except DispfxError as error:
            row["error"] = f"{type(error).__name__}: {error}"
        self._add(row)
        return "error" not in row

    def control(self) -> None:
        """Tune and measure the dense decoder."""
        args, began = self.args, time.perf_counter()
        chosen = {name: getattr(args, name) for name in ("steps", "lr", "seq_len", "batch_size")}
        control = Control(
            ModelSettings(args.model, dtype=args.dtype, device=args.device),
            TextSettings(args.data, data_weight=args.data_weight, eval_data=[args.test, args.second]),
            RecoverySettings(**chosen),
            args.context,
            args.windows,
        )
        found, tokens = control.run()
        row: dict[str, Any] = {"removed": 0.0, "recover": "control", "tokens": tokens}
        row["train_seconds"] = time.perf_counter() - began
        for name, one in zip(TEXTS, found, strict=True):
            row[name] = {
                "perplexity": one.pruned.value,
                "kl": one.agreement.kl_nats,
                "top1": one.agreement.top1,
            }
        self._add(row)

    def _pruned(self, ratio: float) -> Path:
        folder, plan = self.args.out / f"pruned-{ratio:g}", self.args.out / f"plan-{ratio:g}.safetensors"
        if (folder / "report.json").is_file():
            return folder
        named = self.plans.get(f"{ratio:g}")
        if named is None and not plan.is_file():
            steps = {} if self.args.learn_steps is None else {"steps": self.args.learn_steps}
            sizes = {"seq_len": self.args.seq_len, "batch_size": 2} if self.args.learn_steps else {}
            api.learn_plan(
                self.args.model,
                ratio,
                self.args.data,
                plan,
                observer=Notes(),
                data_weight=self.args.data_weight,
                objective=self.args.objective,
                **steps,
                **sizes,
                **self.opened,
            )
        api.apply(
            self.args.model,
            named or plan,
            out=folder,
            export="none",
            eval_data=self.args.test,
            eval_windows=1,
            observer=Notes(),
            **self.opened,
        )
        return folder

    def _recovered(self, pruned: Path, kind: str, ratio: float) -> Path:
        folder = self.args.out / f"{kind}-{ratio:g}"
        if (folder / "report.json").is_file():
            return folder
        chosen = {
            name: getattr(self.args, name)
            for name in ("steps", "lr", "seq_len", "batch_size", "patience", "stream_weight")
        }
        api.recover(
            pruned,
            dense=self.args.model,
            data=self.args.data,
            data_weight=self.args.data_weight,
            eval_data=self.args.choose or self.args.test,
            eval_windows=self.args.windows,
            out=folder,
            train=kind,
            resume=True,
            observer=Notes(),
            device=self.args.device,
            **{name: value for name, value in chosen.items() if value is not None},
        )
        return folder

    def _measured(self, folder: Path, name: str) -> dict[str, float]:
        found = api.agree(
            str(folder),
            dense=self.args.model,
            eval_data=getattr(self.args, name),
            eval_windows=self.args.windows,
            context=self.args.context,
            **self.opened,
        )
        return {"perplexity": self._perplexity(folder, name), "kl": found.kl_nats, "top1": found.top1}

    def _perplexity(self, model: str | Path, name: str) -> float:
        opened = self.opened if str(model) == str(self.args.model) else {"device": self.args.device}
        return api.evaluate(
            str(model),
            eval_data=getattr(self.args, name),
            eval_windows=self.args.windows,
            context=self.args.context,
            **opened,
        ).value

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        facts = {
            "command": " ".join(sys.argv),
            "device": device_name(torch.device(self.args.device)),
            "versions": versions(),
        }
        for file, text in (
            ("recover.json", json.dumps({"facts": facts, "rows": self.rows}, indent=1) + "\n"),
            ("recover.md", _table(self.rows)),
        ):
            with replacing(self.args.out / file) as partial:
                partial.write_text(text, encoding="utf-8")
        print(_line(row), flush=True)


def _facts(folder: Path) -> dict[str, Any]:
    """Return what a folder's report says of its making."""
    report = load_report(folder / "report.json")
    found: dict[str, Any] = {"achieved": report.ratio.achieved, "parameters": report.parameters.pruned}
    told = report.tuned
    if told is not None:
        found |= {
            "tokens": told.steps_done * told.batch_size * told.seq_len,
            "train_seconds": report.seconds.get("recover"),
            "kept": told.kept,
            "held_out": [asdict(one) for one in told.held_out],
            "lr": told.lr,
        }
    return found


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "| removed | recover | perplexity | KL | top-1 | second: perplexity | KL | top-1 | tokens | seconds |"
    )
    return "\n".join([head, "|---|---|" + "---:|" * 8, *map(_line, rows)]) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    cells = [f"{row['removed']:.0%}", row["recover"]]
    if "error" in row:
        return f"| {' | '.join([*cells, row['error'].splitlines()[0]])} |"
    for name in TEXTS:
        one = row[name]
        cells += [f"{one['perplexity']:.2f}", f"{one['kl']:.4f}", f"{one['top1']:.1%}"]
    seconds = row.get("train_seconds")
    cells += [f"{row['tokens']:,}" if "tokens" in row else "", "" if seconds is None else f"{seconds:.0f}"]
    return f"| {' | '.join(cells)} |"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the dense decoder, or demo")
    parser.add_argument("--data", required=True, nargs="+", help="texts to learn masks and weights from")
    parser.add_argument("--data-weight", type=float, nargs="+", help="weight of each of these texts")
    parser.add_argument("--test", required=True, help="text to measure on")
    parser.add_argument("--second", required=True, help="text of another kind to measure on")
    parser.add_argument("--choose", help="text that decides whether weights are kept; --test by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the decoders")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of the decoder")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.3, 0.5])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--plans", nargs="+", default=[], metavar="RATIO=FILE", help="plans learned before")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="kl", help="loss that plans are learned by"
    )
    parser.add_argument("--learn-steps", type=int, help="steps of learning masks; the recipe's by default")
    parser.add_argument("--steps", type=int, help="steps of recovery; the kind's default otherwise")
    parser.add_argument("--lr", type=float, help="learning rate of recovery")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence of recovery")
    parser.add_argument("--batch-size", type=int, help="sequences per step of recovery")
    parser.add_argument("--stream-weight", type=float, help="of the distance of the streams, added to KL")
    parser.add_argument("--patience", type=int, help="measurements without a better one that end training")
    parser.add_argument("--windows", type=int, help="windows to measure on at most")
    parser.add_argument("--context", type=int, help="tokens per window")
    return parser


if __name__ == "__main__":
    sys.exit(main())
