"""report, compare, doctor, and inspect of a plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dispfx.api.installation import Finding
from dispfx.deploy.digests import digests
from dispfx.report import load_report, save_report
from dispfx.report.evaluation import Evaluation, write_evaluation
from tests.report.runs import plan_of, with_weights, write_run

pytestmark = pytest.mark.pictures


def test_report_writes_the_page_and_names_the_files(dispfx, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    result = dispfx("report", folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == str(folder / "report.html")
    files = json.loads(dispfx("report", folder, "--json").stdout)["files"]
    assert all(Path(file).is_file() for file in files) and len(files) == 9
    assert dispfx("report", folder, "--quiet").output == ""


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_folder_that_dispfx_did_not_write_is_refused(dispfx, tmp_path: Path, verb: str):
    result = dispfx(verb, tmp_path)
    assert result.exit_code == 2 and "did not write it" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_measurement_of_another_decoder_is_named_and_not_shown(dispfx, tmp_path: Path, verb: str):
    folder, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    with_weights(folder)
    write_evaluation(Evaluation("other", decoder=with_weights(other, "of another")), folder)
    result = dispfx(verb, folder)
    assert result.exit_code == 0 and "eval.json is of another decoder" in result.stdout
    (note,) = json.loads(dispfx(verb, folder, "--json").stdout)["notes"]
    assert "eval.json is of another decoder" in note


def test_compare_puts_runs_side_by_side(dispfx, tmp_path: Path):
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "second", pruned_perplexity=6.4)]
    result = dispfx("compare", *folders, "--out", tmp_path / "both.html")
    assert result.exit_code == 0, result.output
    assert "2.000" in result.stdout and "1.025" in result.stdout
    assert (tmp_path / "both.png").is_file() and "second" in (tmp_path / "both.html").read_text()
    shown = json.loads(dispfx("compare", *folders, "--json").stdout)
    assert [run["perplexity"] for run in shown["runs"]] == [3.28, 6.4]
    assert dispfx("compare", *folders, "--quiet").output == ""
    assert dispfx("compare", *folders, "--out", tmp_path / "both.pdf").exit_code == 2


@pytest.mark.parametrize("taken", ["both.html", "both.png"])
def test_compare_overwrites_neither_a_page_nor_a_picture(dispfx, tmp_path: Path, taken: str):
    folders = [write_run(tmp_path / "first"), write_run(tmp_path / "second", pruned_perplexity=6.4)]
    (tmp_path / taken).write_text("of the user")
    result = dispfx("compare", *folders, "--out", tmp_path / "both.html")
    assert result.exit_code == 2 and "must not exist yet" in result.stderr and taken in result.stderr
    assert (tmp_path / taken).read_text() == "of the user"
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", taken}


@pytest.mark.parametrize("verb", ["report", "compare"])
def test_a_folder_whose_files_have_changed_since_its_report_is_refused(dispfx, tmp_path: Path, verb: str):
    folder = write_run(tmp_path / "run")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    report = load_report(folder / "report.json")
    save_report(replace(report, files=digests(folder)), folder / "report.json")
    assert dispfx(verb, folder).exit_code == 0
    weights.write_bytes(b"others")
    result = dispfx(verb, folder)
    assert result.exit_code == 2 and "changed since dispfx wrote the folder" in result.stderr
    assert "model.safetensors" in result.stderr and str(folder) in result.stderr
    assert result.stdout == ""


def test_compare_shows_what_two_plans_keep_alike(dispfx, tmp_path: Path):
    paths = [tmp_path / f"{seed}.safetensors" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        plan_of(seed).save(path)
    result = dispfx("compare", *paths)
    assert result.exit_code == 0 and "S4: MLP inner (3 sites)" in result.stdout
    shown = json.loads(dispfx("compare", *paths, "--json").stdout)
    assert len(shown["sites"]) == 15 and shown["same_decoder"]
    assert dispfx("compare", paths[0], "--quiet").exit_code == 2
    assert dispfx("compare", *paths, "--out", "x.html").exit_code == 2


def test_inspect_of_a_plan_shows_what_it_keeps(dispfx, tmp_path: Path):
    path = tmp_path / "plan.safetensors"
    plan_of().save(path)
    result = dispfx("inspect", path)
    assert result.exit_code == 0, result.output
    assert "30.04% of blocks removed" in result.stdout and "21 of 36" in result.stdout
    shown = json.loads(dispfx("inspect", path, "--json").stdout)
    assert shown["sites"][0]["kept"] == plan_of().selections[0].kept.tolist()
    path.write_bytes(b"none")
    assert dispfx("inspect", path).exit_code == 2


def test_a_plan_under_any_name_is_known_as_one(dispfx, tmp_path: Path):
    path = tmp_path / "someplan"
    plan_of().save(path)
    result = dispfx("inspect", path)
    assert result.exit_code == 0 and "30.04% of blocks removed" in result.stdout, result.output
    result = dispfx("eval", path, "--eval-data", path)
    assert result.exit_code == 2 and "holds a plan" in result.stderr and "dispfx apply" in result.stderr
    path.write_bytes(path.read_bytes()[:40])
    result = dispfx("inspect", path)
    assert result.exit_code == 2 and "the only single file that can be read is .gguf" in result.stderr


def test_doctor_shows_what_is_there(dispfx, replaced):
    replaced("doctor", [Finding("torch", "ok", "2.13.0"), Finding("cuda", "optional", "no card")])
    result = dispfx("doctor")
    assert result.exit_code == 0 and "2.13.0" in result.stdout
    assert json.loads(dispfx("doctor", "--json").stdout)["findings"][1]["state"] == "optional"


def test_doctor_fails_where_something_needed_is_missing(dispfx, replaced):
    replaced("doctor", [Finding("torch", "missing", "not installed: pip install 'torch>=2.11'")])
    result = dispfx("doctor")
    assert result.exit_code == 2 and "torch" in result.stderr and "pip install" in result.stdout
