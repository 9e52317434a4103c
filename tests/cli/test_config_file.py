"""`compile --from-report`: the command that a report is the result of, run again."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dispfx.api import opening
from dispfx.learning import settings as recipes
from dispfx.report import Report, Settings, save_report
from dispfx.report.settings import settings_words
from dispfx.settings.learning_settings import LearnSettings


@pytest.fixture
def written(report: Report, tmp_path: Path):
    """Return what writes a report of a command."""

    def write(command: str, settings: Settings | None = None) -> Path:
        save_report(replace(report, command=command, settings=settings), tmp_path / "report.json")
        return tmp_path / "report.json"

    return write


def test_the_words_of_the_report_are_run_with_another_folder(
    dispfx, replaced, report, written, tmp_path: Path
):
    compile_ = replaced("compile", report)
    words = "dispfx compile demo --ratio 0.3 --seed=5 --steps 7 --skip 'a b'"
    path = written(f"{words} --out first --json --resume")
    result = dispfx("compile", "--from-report", path, "--out", tmp_path / "second")

    assert result.exit_code == 0, result.output
    assert compile_.call_args.args == ("demo", 0.3)
    given = compile_.call_args.kwargs
    assert (given["settings"].seed, given["settings"].steps, given["skip"]) == (5, 7, ("a b",))
    assert given["out"] == tmp_path / "second" and given["resume"] is False
    # So that the report of this run can be repeated too.
    assert given["command"] == f"{words} --out {tmp_path / 'second'}"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("dispfx compile demo --ratio 0.3 --out first", ["--ratio", "0.4"]),
        ("dispfx compile demo --ratio 0.3 --out first", ["demo"]),
        ("dispfx.compile(model, 0.3)", []),
        ("dispfx apply demo plan --out first", []),
        ("dispfx compile 'demo", []),
        ("", []),
    ],
)
def test_what_is_not_the_reports_to_say_and_other_calls_are_refused(
    dispfx, replaced, report, written, tmp_path: Path, command: str, words: list[str]
):
    compile_ = replaced("compile", report)
    result = dispfx("compile", "--from-report", written(command), "--out", tmp_path / "second", *words)
    assert result.exit_code == 2 and "error:" in result.output
    assert not compile_.called


def test_a_report_never_says_where_to_write(dispfx, replaced, report, written):
    compile_ = replaced("compile", report)
    result = dispfx("compile", "--from-report", written("dispfx compile demo --ratio 0.3 --out first"))
    assert result.exit_code == 2 and "--out" in result.output and not compile_.called


@pytest.mark.parametrize("model", ["./decoder --trust-remote-code", "tests.api.plain:build_decoder"])
def test_a_report_gives_no_leave_to_run_code(
    dispfx, replaced, report, written, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
):
    compile_ = replaced("compile", report)
    (tmp_path / "decoder").mkdir()
    (tmp_path / "text.txt").write_text("some words", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = written(f"dispfx compile {model} --ratio 0.3 --data text.txt --out first")
    words = ["compile", "--from-report", path, "--out", tmp_path / "second"]

    result = dispfx(*words)
    assert result.exit_code == 2 and "executes code" in result.output and not compile_.called
    result = dispfx(*words, "--trust-remote-code")
    assert result.exit_code == 0 and compile_.call_args.kwargs["trust_remote_code"]


@pytest.mark.parametrize("content", ["[]", "no json", None])
def test_a_report_that_is_none_is_refused(dispfx, tmp_path: Path, content: str | None):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    result = dispfx("compile", "--from-report", path, "--out", tmp_path / "second")
    assert result.exit_code == 2 and "Traceback" not in result.output


# No value is that of a default, a recipe or the demo.
ODD = LearnSettings(
    method="random", steps=11, seq_len=13, batch_size=6, accumulate=2, packing="documents", lr=0.1 + 0.2,
    weight_decay=0.5, lambda_=5.0, budget_on="probabilities", budget_width=0.3,
    samples=3, antithetic=True, sharpen=2.0, start="sensitivity",
    estimator="gumbel", hypernetwork="linear", constrained=True, bias=-1.0, temperature=0.5,
    schedule="cosine", seed=9, save_every=3, max_bad_steps=4,
)  # fmt: skip
SET = Settings(ODD, align=4, select="before-norm", data_bytes=2**21)


def test_the_reports_settings_are_those_of_the_repeated_run(
    dispfx, replaced, report, written, tmp_path: Path
):
    """All of them, whatever the words say of some, and so they are in its own command."""
    compile_ = replaced("compile", report)
    words = "demo --ratio 0.3 --recipe paper --steps 500 --no-antithetic --lr=1e-3 --skip --steps --align 2"
    path = written(f"dispfx compile {words} --out first", SET)
    for out in ("second", "third"):
        result = dispfx("compile", "--from-report", path, "--out", tmp_path / out)
        assert result.exit_code == 0, result.output
        given = compile_.call_args.kwargs
        assert given["settings"] == ODD and given["skip"] == ("--steps",)
        assert (given["align"], given["select"], given["ratio_of"]) == (4, "before-norm", report.ratio.of)
        assert given["data_bytes"] == 2**21
        path = written(given["command"], SET)
    assert given["command"].count("--steps=") == given["command"].count("--recipe") == 1


def test_every_setting_has_an_option_that_the_repeated_run_is_given():
    of_learning = {field.name for field in fields(LearnSettings)}
    without = {"adaptable", "log_every", "held_out_every"}  # what the command line does not set
    options = {word.partition("=")[0][2:].replace("-", "_") for word in settings_words(SET)}
    beside = {"align", "select", "data_bytes", "bos", "recipe"}
    assert {"lambda_" if name == "lambda" else name for name in options} == (of_learning - without) | beside


def test_no_later_default_changes_a_repeated_run(
    dispfx, replaced, report, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_ = replaced("compile", report)
    told = LearnSettings(steps=400, batch_size=8, samples=8, constrained=True, adaptable=("samples",))
    path = written("dispfx compile demo --ratio 0.3 --out first", replace(SET, learning=told))
    later: dict[str, Any] = {"steps": 1, "lr": 0.5, "temperature": 2.0, "samples": 4, "batch_size": 4}
    monkeypatch.setitem(recipes.RECIPES, "informed", later)
    monkeypatch.setattr(opening, "_DEMO_SETTINGS", {"bias": 1.0, "antithetic": True})
    result = dispfx("compile", "--from-report", path, "--out", tmp_path / "second")
    assert result.exit_code == 0, result.output
    assert compile_.call_args.kwargs["settings"] == replace(told, adaptable=())


def test_how_a_run_goes_may_be_given_anew_beside_settings(dispfx, replaced, report, written, tmp_path: Path):
    compile_ = replaced("compile", report)
    words = "dispfx compile demo --ratio 0.3 --save-every 50 --out first"
    path = written(words, SET)
    result = dispfx("compile", "--from-report", path, "--out", tmp_path / "2", "--save-every", 2)
    assert result.exit_code == 0, result.output
    assert compile_.call_args.kwargs["settings"] == replace(ODD, save_every=2)


def test_another_number_of_processes_gets_a_batch_that_it_can_share(
    dispfx, replaced, report, written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compile_ = replaced("compile", report)
    monkeypatch.setattr("dispfx.cli.making.launches", lambda count: False)
    for adaptable, batch in (("samples", "batch_size"), 8), ((), 6):
        learned = replace(ODD, samples=6, batch_size=6, adaptable=adaptable)
        path = written("dispfx compile demo --ratio 0.3 --out first", replace(SET, learning=learned))
        result = dispfx("compile", "--from-report", path, "--out", tmp_path / "2", "--launch", 4)
        assert result.exit_code == 0, result.output
        found = compile_.call_args.kwargs["settings"]
        assert (found.batch_size, found.samples) == (batch, batch)
