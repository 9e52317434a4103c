"""Measured latency tables: valid, and with larger products and steps that cost more."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dispfx.benchmark import step_times as measuring
from dispfx.benchmark.product_times import product_times
from dispfx.compiler.cached_programs import capture_cached
from dispfx.ir.cached_inputs import CachedShape
from dispfx.plan.budget import Budget
from dispfx.plan.latency_table import LatencyTable, read_costs
from tests.command_line import run
from tests.tiny_transformers import tiny_transformer

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
bench_targets = importlib.import_module("bench_targets")
sys.path.pop(0)


def test_measured_products_are_valid_and_rise_with_size():
    table = product_times(torch.device("cpu"), torch.float32, 4, (8, 1024), rounds=3)
    assert LatencyTable.of_plain({**vars(table), "steps": []}) == table
    assert (table.tokens, table.rows, table.columns) == (4, (8, 1024), (8, 1024))
    assert table.product_seconds(1024, 1024) > table.product_seconds(8, 8) > 0
    assert table.selection_seconds > 0


def test_a_step_is_timed_at_every_ratio_and_once_with_half_of_the_heads(monkeypatch: pytest.MonkeyPatch):
    """With times that are the parameters left, the model is that line; heads save nothing beyond it."""
    monkeypatch.setattr(measuring, "RATIOS", (0.2, 0.4, 0.6))
    model, pairs = tiny_transformer("llama"), []

    def pair(timed, program, plan, shape):
        pairs.append([one.kind for one in program.sites if len(plan.kept[one.name]) < one.size])
        return 1.0, measuring._left(program, plan) / program.size

    monkeypatch.setattr(measuring, "_pair", pair)
    plain, heads = capture_cached(model), capture_cached(model, sites=("heads",))
    shape = CachedShape(1, 1, 8)
    times = measuring.step_times(measuring.Timed(plain, heads, 1, "eager"), shape)
    assert len(pairs) == 4 and ["heads" in kinds for kinds in pairs] == [False, False, False, True]
    assert times.text == "decode 1@8" and times.dense_seconds == 1.0 and times.cache_seconds < 1e-6
    assert times.seconds == pytest.approx([size / plain.size for size in times.parameters])
    removed = [1 - size / plain.size for size in times.parameters]
    assert removed == sorted(removed, reverse=True) and len(removed) == 3


def test_the_verb_writes_a_table_that_a_run_takes(tmp_path: Path):
    out = tmp_path / "costs.json"
    words = ["--step", "prefill 1x16", "--sites", "heads", "--out", out]
    result = run("costs", "demo", *words)
    assert result.exit_code == 0, result.output
    assert re.search(r"prefill 1x16, eager: dense [\d.]+ ms; pruned \d+% of the parameters", result.stdout)
    table = read_costs(out)
    (times,) = table.steps
    assert times.dense_parameters == 853_120 and len(times.seconds) >= 5 and table.tokens == 16
    shape = ["--constraint", f"prefill 1x16: {1e3 * times.seconds[-1]:f} ms", "--method", "magnitude"]
    plan = tmp_path / "plan.safetensors"
    learned = run("learn", "demo", *shape, "--ratio", 0.2, "--costs", out, "--out", plan, "--json")
    assert learned.exit_code == 0, learned.output
    (met,) = json.loads(learned.stdout)["constraints"]
    assert met["left"] <= met["most"] and met["dense"] == times.dense_seconds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "decode 8"], "--step cannot be read"),
        (["--step", "prefill 1x99999"], "99999 tokens were requested, but the decoder reads 1 to"),
        (["--align", "0"], "It must be at least 1"),
    ],
)
def test_what_cannot_be_timed_is_refused_first(tmp_path: Path, words: list[str], said: str):
    result = run("costs", "demo", *words, "--out", tmp_path / "costs.json")
    assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
    (tmp_path / "costs.json").touch()
    assert run("costs", "demo", "--out", tmp_path / "costs.json").exit_code == 2


def test_the_tool_prints_what_was_asked_expected_and_measured(monkeypatch, capsys):
    words = ["--shape", "tiny", "--layers", "1", "--align", "8", "--step", "prefill 1x16"]
    asked = ["--constraint", "prefill 1x16: 100 s", "--constraint", "prefill 1x16: 0.000001 us"]
    monkeypatch.setattr(measuring, "RATIOS", (0.2, 0.5))
    monkeypatch.setattr(sys, "argv", ["bench_targets.py", *words, *asked])
    bench_targets.main()
    lines = capsys.readouterr().out.splitlines()
    assert "met without removing anything" in lines[-2] and "cannot meet a constraint" in lines[-1]
    program = capture_cached(tiny_transformer("llama"))
    times = measuring.StepTimes(1, 16, 0, "eager", program.size, 1.0, (1, program.size), (0.1, 1.0))
    table = LatencyTable("a card", "float32", 1, (1,), (1,), ((1.0,),), steps=(times,))
    budget = Budget(0.0, costs=table, constraints=("prefill 1x16: 1.2x",))
    line = bench_targets.line_of(program, budget, "eager", 0)
    measured = r"[\d.]+ × \([\d.]+ → [\d.]+ ms\) \| [+-][\d.]+%"
    assert re.fullmatch(rf"\| prefill 1x16: 1\.2x \| [\d.]+% \| 1\.20\d × \| {measured} \|", line)
