"""Targets besides the ratio, from the command to the folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from dispfx import api
from dispfx.errors import DataError, OutputError
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from tests.api.conftest import MODEL, SETTINGS, Watcher
from tests.command_line import run
from tests.learning_options import options_of

# The decoder has one layer of four heads.
COMMON: dict[str, Any] = {"align": 1, **options_of(SETTINGS)}
WORDS = ["--align", 1, "--steps", 2, "--seq-len", 16, "--batch-size", 2, "--samples", 1]


def test_a_folder_says_what_was_asked_and_achieved_of_the_cache(tokens: Path, tmp_path: Path):
    out = tmp_path / "out"
    words = ["--ratio", 0.3, "--kv-ratio", 0.4, "--method", "magnitude", "--export", "none", "--out", out]
    result = run("compile", MODEL, "--data", tokens, *WORDS, *words)
    assert result.exit_code == 0, result.output
    assert "40.00% requested  50.00% achieved" in result.stdout
    report = load_report(out / "report.json")
    assert report.kv_ratio is not None and (report.kv_ratio.requested, report.kv_ratio.achieved) == (0.4, 0.5)
    assert report.settings is not None and report.settings["budget"]["sites"] == ["heads"]
    shown = json.loads(run("inspect", out / "plan.safetensors", "--json").stdout)
    assert shown["kv_ratio"] == {"requested": 0.4, "achieved": 0.5}
    assert shown["cache_bytes_per_token"] == {"dense": 2 * 32 * 4, "pruned": 32 * 4}


def test_a_dry_run_says_what_the_cache_becomes(tokens: Path, tmp_path: Path):
    words = ["--ratio", 0.3, "--kv-ratio", 0.4, "--dry-run", "--out", tmp_path / "plan"]
    result = run("learn", MODEL, "--data", tokens, *WORDS, *words)
    assert result.exit_code == 0, result.output
    assert "KV cache: 50.00% removed, 40.00% requested; 256 → 128 bytes per token" in result.output


def test_a_share_out_of_reach_is_refused_before_learning(tokens: Path, tmp_path: Path):
    words = ["--ratio", 0.3, "--kv-ratio", 0.8, "--out", tmp_path / "plan.safetensors"]
    result = run("learn", MODEL, "--data", tokens, *WORDS, *words)
    assert result.exit_code == 2 and "at most 0.7500 can be removed" in result.output
    assert "a smaller --kv-ratio" in result.output and not list(tmp_path.iterdir())


def test_a_run_resumes_with_its_own_share_only(tokens: Path, tmp_path: Path):
    out = tmp_path / "plan.safetensors"

    class Impatient(Watcher):
        def learning(self, record: Any) -> None:
            raise KeyboardInterrupt

    def learned(kv_ratio: float | None, **further: Any) -> Plan:
        plan = api.learn_plan(MODEL, 0.3, tokens, out, kv_ratio=kv_ratio, **COMMON, **further)
        assert isinstance(plan, Plan)
        return plan

    with pytest.raises(KeyboardInterrupt):
        learned(0.5, observer=Impatient())
    with pytest.raises(DataError, match=r"kv_ratio was 0\.5 and is 0\.25"):
        learned(0.25, resume=True)
    plan = learned(0.5, resume=True)
    assert plan.cache is not None and plan.cache.removed == 0.5
    assert learned(0.5, resume=True) == plan
    for other in (0.25, None):
        with pytest.raises(OutputError, match=rf"kv_ratio was 0\.5 and is {other}"):
            learned(other, resume=True)


def test_a_folder_takes_no_more_than_its_constraints(tokens: Path, tmp_path: Path):
    out = tmp_path / "out"
    words = ["--constraint", "size: 65%", "--constraint", "memory 2x32: 90%", "--method", "magnitude"]
    result = run("compile", MODEL, "--data", tokens, *WORDS, *words, "--export", "none", "--out", out)
    assert result.exit_code == 0, result.output
    report = load_report(out / "report.json")
    first, second = report.constraints
    assert (first.text, second.text) == ("size: 65%", "memory 2x32: 90%")
    assert first.dense == report.bytes.dense and second.dense == first.dense + 256 * 2 * 32
    assert first.left <= first.most == 0.65 * first.dense and second.left <= second.most
    assert max(first.left / first.most, second.left / second.most) > 0.98
    assert report.ratio.requested == report.ratio.achieved > 0.3
    assert "size: 65%" in result.stdout
    words = ["--config", out / "report.json", "--data", tokens, "--dry-run", "--out", tmp_path / "x"]
    again = run("compile", MODEL, *words)
    assert again.exit_code == 0 and "size: 65%: " in again.output, again.output


def test_the_weight_file_of_the_demo_is_as_large_as_was_asked_for(tmp_path: Path):
    out = tmp_path / "out"
    api.compile("demo", out=out, constraint="size: 2.5 MB", method="magnitude", export="none", eval_windows=1)
    assert 0.97 * 2.5e6 <= (out / "model.safetensors").stat().st_size <= 2.5e6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--constraint", "size 6 GB"], 'write it as in "size: 6 GB"'),
        (["--constraint", "size: 99 GB"], "met without removing anything"),
        (["--constraint", "size: 1%"], "cannot meet a constraint: size: 1%, where at least"),
        ([], "--ratio is needed, or --constraint"),
    ],
)
def test_a_constraint_that_makes_no_sense_is_refused_before_learning(
    tokens: Path, tmp_path: Path, words: list[str], said: str
):
    result = run("learn", MODEL, "--data", tokens, *WORDS, *words, "--out", tmp_path / "plan.safetensors")
    assert result.exit_code == 2 and said in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_run_resumes_with_its_own_constraints_only(tokens: Path, tmp_path: Path):
    out = tmp_path / "plan.safetensors"

    def learned(constraint: str, **further: Any) -> Plan:
        plan = api.learn_plan(MODEL, None, tokens, out, constraint=constraint, **COMMON, **further)
        assert isinstance(plan, Plan)
        return plan

    plan = learned("size: 70%")
    assert learned("size: 70%", resume=True) == plan
    with pytest.raises(OutputError, match=r"constraint was \['size: 70%'\] and is \['size: 80%'\]"):
        learned("size: 80%", resume=True)
    with pytest.raises(OutputError, match=r"constraint was \['size: 70%'\] and is \[\]"):
        api.learn_plan(MODEL, plan.budget.ratio, tokens, out, **COMMON, resume=True)


@pytest.mark.parametrize("words", [["--kv-ratio", 0.5], ["--constraint", "size: 70%"]])
def test_a_range_of_ratios_has_no_other_target(tokens: Path, tmp_path: Path, words: list[Any]):
    words = [*words, "--ratio", "0.1:0.3", "--out", tmp_path / "family.safetensors"]
    result = run("learn", MODEL, "--data", tokens, *WORDS, *words)
    assert (
        result.exit_code == 2 and "is a target of one plan, and a range of ratios was given" in result.output
    )
