"""`compile --config`: the settings of an earlier run, overridden by the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dispfx.report import Report, save_report
from dispfx.settings import RunSettings, learning_settings
from dispfx.settings.learning_settings import LearnSettings
from tests.cli.asked import asked, flat

# No value is that of a default, a recipe or the demo.
ODD = LearnSettings(
    method="random", steps=11, seq_len=13, batch_size=6, accumulate=2, packing="documents", lr=0.1 + 0.2,
    weight_decay=0.5, lambda_=5.0, budget_on="probabilities", budget_width=0.3,
    samples=3, antithetic=True, sharpen=2.0, start="sensitivity",
    estimator="gumbel", hypernetwork="linear", constrained=True, bias=-1.0, temperature=0.5,
    schedule="cosine", seed=9, save_every=3, max_bad_steps=4,
)  # fmt: skip
SET = RunSettings.of(
    model="demo",
    ratio=0.35,
    ratio_of="total",
    align=4,
    select="before-norm",
    skip=("a b",),
    data_bytes=2**21,
    bos="on",
    eval_windows=3,
    checkpointing="off",
    export="none",
    out=Path("first"),
    dtype="float32",
).fitted(ODD)


@pytest.fixture
def written(report: Report, tmp_path: Path):
    """Return what writes the report of a run."""

    def write(settings: RunSettings | None = SET) -> Path:
        plain = None if settings is None else settings.plain()
        save_report(replace(report, settings=plain), tmp_path / "report.json")
        return tmp_path / "report.json"

    return write


def test_the_settings_of_a_report_are_those_of_the_run_with_another_folder(
    dispfx, replaced, report, written, tmp_path: Path
):
    compile_ = replaced("run_compile", report)
    path = written()
    result = dispfx("compile", "--config", path, "--out", tmp_path / "second")

    assert result.exit_code == 0, result.output
    found = compile_.call_args.args[0]
    where_and_how = {"out": tmp_path / "second", "save_every": 3}
    assert flat(found) == flat(SET) | where_and_how | {"config": None}
    # So that the report of this run can be repeated too.
    again = written(found)
    assert dispfx("compile", "--config", again, "--out", tmp_path / "third").exit_code == 0
    assert asked(compile_) == flat(found) | {"out": tmp_path / "third"}


def test_settings_come_back_from_json_as_they_were():
    plain = json.loads(json.dumps(SET.plain(), allow_nan=False))
    sections = {
        name: {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        for name, values in plain.items()
    }
    again = RunSettings(**{name: kind(**sections[name]) for name, kind in RunSettings.sections().items()})
    assert flat(again) | {"out": Path("first")} == flat(SET)


def test_what_is_given_anew_wins(dispfx, replaced, report, written, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    words = ["--ratio", 0.4, "--steps", 5, "--save-every", 2, "--skip", "c", "--no-antithetic"]
    result = dispfx("compile", "--config", written(), "--out", tmp_path / "second", *words)
    assert result.exit_code == 0, result.output
    found = compile_.call_args.args[0]
    assert found.budget.ratio == 0.4 and list(found.budget.skip) == ["c"] and found.budget.align == 4
    assert found.learning == replace(ODD, steps=5, save_every=2, antithetic=False)


def test_another_model_than_that_of_the_file_may_be_given(dispfx, replaced, report, written, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    (tmp_path / "decoder").mkdir()
    words = ["compile", tmp_path / "decoder", "--config", written(), "--out", tmp_path / "second"]
    assert "text to learn from is needed" in dispfx(*words).stderr
    (tmp_path / "text.txt").write_text("some words", encoding="utf-8")
    assert dispfx(*words, "--data", tmp_path / "text.txt").exit_code == 0
    assert asked(compile_)["model"] == str(tmp_path / "decoder") and asked(compile_)["ratio"] == 0.35


def test_a_file_with_sections_alone_is_taken_too(dispfx, replaced, report, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(SET.plain()), encoding="utf-8")
    assert dispfx("compile", "--config", path, "--out", tmp_path / "second").exit_code == 0
    assert compile_.call_args.args[0].learning == ODD


@pytest.mark.parametrize("learning", [{}, {"steps": 60}])
def test_what_a_file_of_chosen_settings_leaves_out_is_as_on_the_command_line(
    dispfx, replaced, report, tmp_path: Path, learning: dict[str, Any]
):
    compile_ = replaced("run_compile", report)
    path, out = tmp_path / "settings.json", tmp_path / "second"
    chosen = {"model": {"model": "demo"}, "budget": {"ratio": 0.4}, "learning": learning}
    path.write_text(json.dumps(chosen), encoding="utf-8")
    assert dispfx("compile", "--config", path, "--out", out).exit_code == 0
    found = asked(compile_)
    words = [word for name, value in learning.items() for word in (f"--{name}", value)]
    assert dispfx("compile", "demo", "--ratio", 0.4, *words, "--out", out).exit_code == 0
    assert found == asked(compile_) and found["objective"] == "kl"
    assert dispfx("compile", "--config", path, "--recipe", "paper", "--out", out).exit_code == 0
    assert asked(compile_)["objective"] == "ce"


def test_a_file_never_says_where_to_write(dispfx, replaced, report, written):
    compile_ = replaced("run_compile", report)
    result = dispfx("compile", "--config", written())
    assert result.exit_code == 2 and "--out" in result.output and not compile_.called


@pytest.mark.parametrize(
    ("model", "trusted"), [("./decoder", True), ("tests.api.plain:build_decoder", False)]
)
def test_a_file_gives_no_permission_to_run_code(
    dispfx, replaced, report, written, tmp_path: Path, model: str, trusted: bool, monkeypatch
):
    compile_ = replaced("run_compile", report)
    (tmp_path / "decoder").mkdir()
    (tmp_path / "text.txt").write_text("some words", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = written(SET.changed(model=model, trust_remote_code=trusted, data=("text.txt",)))
    words = ["compile", "--config", path, "--out", tmp_path / "second"]

    result = dispfx(*words)
    assert result.exit_code == 2 and "asks to run code" in result.output and not compile_.called
    result = dispfx(*words, "--trust-remote-code")
    assert result.exit_code == 0 and asked(compile_)["trust_remote_code"]


@pytest.mark.parametrize("name", ["method", "estimator"])
def test_a_file_gives_no_permission_to_run_a_function_of_a_setting(
    dispfx, replaced, report, written, tmp_path: Path, name: str, monkeypatch
):
    compile_ = replaced("run_compile", report)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("open('it-ran', 'w')", encoding="utf-8")
    words = [
        "compile",
        "--config",
        written(SET.changed(**{name: "mine.py:own"})),
        "--out",
        tmp_path / "second",
    ]

    for more in ((), ("demo",)):
        result = dispfx(words[0], *more, *words[1:])
        assert (
            result.exit_code == 2 and "asks to run code" in result.output and "mine.py:own" in result.output
        )
    assert not compile_.called and not Path("it-ran").exists()
    assert dispfx(*words, "--trust-remote-code").exit_code == 0
    assert asked(compile_)[name] == "mine.py:own"
    assert dispfx(*words, f"--{name}", "random" if name == "method" else "gumbel").exit_code == 0
    assert not Path("it-ran").exists()


@pytest.mark.parametrize("content", ["[]", "no json", "{}", '{"settings": null}', '{"settings": 3}', None])
def test_a_file_without_settings_is_refused(dispfx, replaced, report, tmp_path: Path, content: str | None):
    compile_ = replaced("run_compile", report)
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = dispfx("compile", "--config", path, "--out", tmp_path / "second")
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and str(path) in result.stderr
    assert "Traceback" not in result.output and not compile_.called


def test_the_report_of_a_plan_that_was_applied_has_none_and_says_so(
    dispfx, replaced, report, written, tmp_path: Path
):
    result = dispfx("compile", "--config", written(None), "--out", tmp_path / "second")
    assert result.exit_code == 2 and "a run that learned" in result.stderr


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("learning", "steps", "many", 'learning.steps must be int and is "many"'),
        ("learning", "stesp", 3, "learning has no setting 'stesp'"),
        ("learning", "steps", -1, "--steps must be at least 1"),
        ("learning", "adaptable", 5, "learning.adaptable must be a list of str and is 5"),
        ("learning", "log_every", "x", 'learning.log_every must be int and is "x"'),
        ("budget", "ratio", True, "budget.ratio must be float or str and is true"),
        ("budget", "select", "behind", "select must be after-norm or before-norm"),
        ("text", "data", [3], "text.data must be a list of str and is [3]"),
        ("model", "model", {"a": 1}, 'model.model must be str and is {"a": 1}'),
    ],
)
def test_a_value_that_no_setting_has_is_refused_by_name(
    dispfx, replaced, report, tmp_path: Path, section: str, name: str, value: Any, told: str
):
    compile_ = replaced("run_compile", report)
    plain = SET.plain()
    plain[section] = plain[section] | {name: value}
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    result = dispfx("compile", "--config", path, "--out", tmp_path / "second")
    assert result.exit_code == 2 and told in result.stderr, result.output
    assert "Traceback" not in result.output and not compile_.called


def test_what_was_an_object_in_python_has_to_be_given(dispfx, replaced, report, written, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    path = written(SET.changed(model=nn.Linear(2, 2), data=torch.arange(9)))
    words = ["compile", "--config", path, "--out", tmp_path / "second"]
    result = dispfx(*words)
    assert result.exit_code == 2 and "MODEL is needed with this --config" in result.stderr
    result = dispfx(*words, "demo")
    assert result.exit_code == 2 and "--data is needed with this --config" in result.stderr
    (tmp_path / "text.txt").write_text("some words", encoding="utf-8")
    assert dispfx(*words, "demo", "--data", tmp_path / "text.txt").exit_code == 0
    assert asked(compile_)["data"] == [str(tmp_path / "text.txt")]


def test_no_later_default_changes_a_repeated_run(
    dispfx, replaced, report, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_ = replaced("run_compile", report)
    told = LearnSettings(steps=400, batch_size=8, samples=8, constrained=True, adaptable=("samples",))
    path = written(SET.fitted(told))
    later: dict[str, Any] = {"steps": 1, "lr": 0.5, "temperature": 2.0, "samples": 4, "batch_size": 4}
    monkeypatch.setitem(learning_settings.RECIPES, "informed", later)  # type: ignore[arg-type]
    monkeypatch.setattr(learning_settings, "DEMO", {"bias": 1.0, "antithetic": True})
    result = dispfx("compile", "--config", path, "--out", tmp_path / "second")
    assert result.exit_code == 0, result.output
    assert compile_.call_args.args[0].learning == told


def test_a_recipe_cannot_be_changed_with_a_file(dispfx, replaced, report, written, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    words = ["compile", "--config", written(), "--out", tmp_path / "second", "--recipe", "paper"]
    result = dispfx(*words)
    assert result.exit_code == 2 and "recipe" in result.stderr and not compile_.called
