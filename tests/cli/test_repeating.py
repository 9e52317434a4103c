"""`compile --from-report`: the command that a report is the result of, run again."""

from dataclasses import replace
from pathlib import Path

import pytest

from dispfx.report import Report, save_report


@pytest.fixture
def written(report: Report, tmp_path: Path):
    """Return what writes a report of a command."""

    def write(command: str) -> Path:
        save_report(replace(report, command=command), tmp_path / "report.json")
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
