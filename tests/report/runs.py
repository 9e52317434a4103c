"""A small folder as a compile leaves it, without weights."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dispfx.deploy.digests import digests, identity_of
from dispfx.learning.records import StepRecord
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan, Selection
from dispfx.report import SiteWidth, load_report, save_report
from tests.report.example import example_report

WIDTH, INNER, LAYERS = 12, 20, 3
_SITES = (
    ("attention", "read", "S1"),
    ("attention", "write", "S2"),
    ("mlp", "read", "S3"),
    ("mlp", "inner", "S4"),
    ("mlp", "write", "S5"),
)


def plan_of(seed: int = 0) -> Plan:
    """Return a plan of three layers whose features are drawn; feature 0 is kept everywhere, 11 nowhere."""
    generator = torch.Generator().manual_seed(seed)
    selections = []
    for layer in range(LAYERS):
        for branch, kind, symbol in _SITES:
            size = INNER if kind == "inner" else WIDTH
            drawn = torch.randperm(size - 2, generator=generator)[: size // 2] + 1
            kept = torch.cat([torch.zeros(1, dtype=torch.int64), drawn.sort().values]).to(torch.int32)
            name = f"layers.{layer}.{branch}.{kind}"
            selections.append(Selection(name, size, kept, (f"{name}.weight:0",), symbol=symbol))
    return Plan("f" * 8, Budget(0.3), tuple(selections), 0.3004, seed)


def step(number: int, loss: float = 2.0) -> StepRecord:
    """Return one step of twenty."""
    return StepRecord(
        number, 20, loss, 0.1 / number, 0.3 - 0.1 / number, 100.0, 1.0, 0, 2.5 if number == 10 else None
    )


def write_run(folder: Path, seed: int = 0, *, steps: int = 20, pruned_perplexity: float = 3.28) -> Path:
    """Write report.json, plan.safetensors and metrics.jsonl, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(seed)
    sites = tuple(
        SiteWidth(one.site, one.site.rsplit(".", 1)[1], one.size, len(one.kept)) for one in plan.selections
    )
    report = example_report()
    assert report.perplexity is not None
    perplexity = replace(report.perplexity, pruned=pruned_perplexity)
    save_report(replace(report, sites=sites, perplexity=perplexity), folder / "report.json")
    plan.save(folder / "plan.safetensors")
    lines = [json.dumps(asdict(step(number))) for number in range(1, steps + 1)]
    if lines:
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def with_weights(folder: Path, weights: str = "weights") -> str:
    """Give a folder of `write_run` a decoder's files, and return what identifies the decoder."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    report = folder / "report.json"
    save_report(replace(load_report(report), files=digests(folder)), report)
    own = identity_of(folder)
    assert own is not None
    return own
