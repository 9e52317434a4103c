"""compile, learn and apply: what reaches the compiler, what is shown, what is refused first."""

import json
from pathlib import Path

import pytest
import torch

from dispfx.cli.making import command_line
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan, Selection
from dispfx.report import Report, from_json
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.trees import RunSettings
from tests.cli.asked import asked, flat
from tests.report.test_preview import example_preview


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("some text")
    return path


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    path = tmp_path / "decoder"
    path.mkdir()
    return path


@pytest.fixture
def plan() -> Plan:
    kept = torch.tensor([0, 2], dtype=torch.int32)
    return Plan("f" * 64, Budget(0.3), (Selection("a", 4, kept, ("w:1",)),), 0.3001)


def test_compile_without_options_leaves_every_default_to_the_compiler(
    dispfx, replaced, report: Report, tmp_path: Path
):
    compile_ = replaced("run_compile", report)
    result = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out")

    assert result.exit_code == 0, result.output
    command = compile_.call_args.kwargs["command"]
    assert command == f"dispfx compile demo --ratio 0.3 --out {tmp_path / 'out'}"
    given = asked(compile_)
    assert given == flat(RunSettings.of(model="demo", ratio=0.3, out=tmp_path / "out"))
    for name in ("data", "eval_data", "eval_windows", "tokenizer", "align", "target", "dtype"):
        assert given[name] is None, name
    for name in ("device", "revision", "export", "data_weight"):
        assert given[name] is None, name
    assert given["resume"] is False and given["trust_remote_code"] is False
    assert given["ratio_of"] == "blocks" and given["skip"] == ()
    assert given["select"] == "after-norm"


def test_compile_hands_on_every_option(dispfx, replaced, report: Report, tmp_path: Path, decoder, text):
    compile_ = replaced("run_compile", report)
    words = ["compile", decoder, "--ratio", 0.5, "--out", tmp_path / "out", "--ratio-of", "total"]
    words += ["--data", text, "--data", text, "--eval-data", text, "--eval-windows", 3, "--tokenizer", "tok"]
    words += ["--data-weight", 2, "--data-weight", 1, "--data-field", "body", "--data-bytes", 2**20]
    words += ["--steps", 5, "--seq-len", 16, "--batch-size", 2, "--lr", 0.01, "--lambda", 4]
    words += ["--estimator", "gumbel", "--hypernetwork", "none", "--constrained", "--seed", 9]
    words += ["--save-every", 2, "--align", 8, "--skip", "a", "--skip", "b", "--target", "cuda"]
    words += ["--dtype", "bfloat16", "--device", "cpu", "--trust-remote-code", "--export", "onnx"]
    words += ["--print-after", "canonicalize", "--resume", "--select", "before-norm"]
    words += ["--recipe", "paper"]
    result = dispfx(*words)

    assert result.exit_code == 0, result.output
    given = asked(compile_)
    assert compile_.call_args.args[0].learning == LearnSettings(
        steps=5,
        seq_len=16,
        batch_size=2,
        lr=0.01,
        lambda_=4.0,
        estimator="gumbel",
        hypernetwork="none",
        constrained=True,
        seed=9,
        save_every=2,
        adaptable=("samples",),
    )
    assert (
        given["data"] == [str(text)] * 2 and given["eval_data"] == [str(text)] and given["eval_windows"] == 3
    )
    assert list(given["data_weight"]) == [2.0, 1.0] and given["data_field"] == "body"
    assert given["data_bytes"] == 2**20
    assert tuple(given["skip"]) == ("a", "b") and given["align"] == 8 and given["target"] == "cuda"
    assert given["ratio_of"] == "total" and given["tokenizer"] == "tok" and given["resume"] is True
    assert given["dtype"] == "bfloat16" and given["device"] == "cpu" and given["export"] == "onnx"
    assert given["trust_remote_code"] is True
    assert "canonicalize did not run in this command" in result.stdout, "nothing was compiled"
    assert given["select"] == "before-norm"


@pytest.mark.parametrize("more", [[], ["--constrained", "--costs", "costs.json"]])
def test_a_selection_before_the_norms_is_for_the_whole_stream(dispfx, replaced, report, tmp_path, more):
    compile_ = replaced("run_compile", report)
    words = ["compile", "demo", "--ratio", 0.3, "--select", "before-norm", "--out", tmp_path / "out", *more]

    result = dispfx(*words)

    assert result.exit_code == 2 and "whole" in result.stderr
    assert not compile_.called


def test_one_setting_of_the_demo_keeps_its_other_settings(dispfx, replaced, report: Report, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out", "--steps", 7)
    settings = compile_.call_args.args[0].learning
    assert (settings.steps, settings.seq_len, settings.batch_size, settings.lr) == (7, 128, 8, 3e-3)


def test_json_is_the_report_and_nothing_else_on_stdout(dispfx, replaced, report: Report, tmp_path: Path):
    replaced("run_compile", report)
    result = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out", "--json", "--quiet")
    assert from_json(result.stdout) == report
    assert result.stderr == ""


def test_quiet_prints_nothing(dispfx, replaced, report: Report, tmp_path: Path):
    replaced("run_compile", report)
    result = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_progress_goes_to_stderr_with_json_and_to_stdout_without(
    dispfx, replaced, report: Report, tmp_path: Path
):
    compile_ = replaced("run_compile", report)
    compile_.side_effect = lambda settings, observer, **rest: (observer.note("a note"), report)[1]
    plain = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out")
    assert "a note" in plain.stdout and plain.stderr == ""
    as_json = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out", "--json")
    assert "a note" in as_json.stderr and from_json(as_json.stdout) == report


@pytest.mark.parametrize("ratio", ["0", "1", "1.5", "-0.1", "nan", "30"])
def test_a_ratio_outside_its_range_is_refused(dispfx, replaced, tmp_path: Path, ratio: str):
    compile_ = replaced("run_compile")
    result = dispfx("compile", "demo", f"--ratio={ratio}", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "between 0 and 1" in result.stderr
    assert not compile_.called


def test_wrong_words_are_refused_before_the_compiler_is_asked(
    dispfx, replaced, tmp_path: Path, decoder: Path, text: Path
):
    compile_ = replaced("run_compile")
    empty = tmp_path / "empty.txt"
    empty.touch()
    out = tmp_path / "out"
    wrong = {
        "a folder that does not exist": [tmp_path / "absent", "--data", text],
        "the text file does not exist": [decoder, "--data", tmp_path / "absent.txt"],
        "this is a folder": [decoder, "--data", decoder],
        "the text is empty": [decoder, "--data", empty],
        "text to learn from is needed": [decoder],
        "--data-weight must be given once per --data": [
            decoder,
            "--data",
            text,
            "--data-weight",
            1,
            "--data-weight",
            1,
        ],
        "not a valid data set name": [decoder, "--data", "datasets:"],
        "compressed text format is JSON: .jsonl.gz": [decoder, "--data", "text.txt.gz"],
        "data-bytes": [decoder, "--data", text, "--data-bytes", 1000],
        "Unknown option: --ratios. Did you mean --ratio?": ["demo", "--ratios", "1"],
        "estimator must be reinmax or gumbel or straight-through, and 'guess' was given": [
            "demo",
            "--estimator",
            "guess",
        ],
        '"guess" for --hypernetwork. Choose from: "full", "linear", "none"': [
            "demo",
            "--hypernetwork",
            "guess",
        ],
        "eval-windows": ["demo", "--eval-windows", "0"],
        '"0" for --steps. It must be at least 1': ["demo", "--steps", "0"],
    }
    for reason, words in wrong.items():
        result = dispfx("compile", *words, "--ratio", 0.3, "--out", out)
        assert result.exit_code == 2, (reason, result.output)
        assert reason in result.stderr.replace("\n", " "), (reason, result.stderr)
        assert "Traceback" not in result.output
    assert not compile_.called and not out.exists()


def test_a_folder_that_exists_is_refused_and_left_alone(dispfx, replaced, tmp_path: Path):
    compile_ = replaced("run_compile")
    (tmp_path / "mine").write_text("keep")
    result = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path)
    assert result.exit_code == 2 and str(tmp_path) in result.stderr
    assert not compile_.called and (tmp_path / "mine").read_text() == "keep"


def test_resume_leaves_a_folder_that_exists_to_the_compiler(dispfx, replaced, report: Report, tmp_path: Path):
    compile_ = replaced("run_compile", report)
    result = dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path, "--resume")
    assert result.exit_code == 0 and compile_.called


def test_a_dry_run_asks_for_a_preview_with_the_same_arguments_and_runs_nothing(
    dispfx, replaced, tmp_path: Path, decoder: Path, text: Path
):
    compile_, learn = replaced("run_compile"), replaced("run_learn")
    preview = replaced("preview", example_preview())
    for verb, written in (("compile", "a pruned decoder"), ("learn", "a plan")):
        words = [verb, decoder, "--ratio", 0.3, "--data", text, "--out", tmp_path / "out", "--steps", 5]
        result = dispfx(*words, "--dry-run", "--launch", 2)
        assert result.exit_code == 0, result.output
        given = asked(preview)
        assert (given["model"], given["ratio"]) == (str(decoder), 0.3)
        assert given["out"] == tmp_path / "out" and given["steps"] == 5
        assert "nothing was written" in result.stdout and written in result.stdout
        shown = json.loads(dispfx(*words, "--dry-run", "--json").stdout)
        assert shown["dry_run"] is True and shown["ratio"]["reachable"] == 0.3004
    assert not compile_.called and not learn.called


def test_learn_writes_a_plan_and_says_what_it_removes(
    dispfx, replaced, plan: Plan, tmp_path: Path, decoder, text
):
    learn = replaced("run_learn", plan)
    out = tmp_path / "plan.safetensors"
    result = dispfx("learn", decoder, "--ratio", 0.3, "--data", text, "--out", out, "--steps", 5)
    assert result.exit_code == 0, result.output
    given = asked(learn)
    assert (given["model"], given["ratio"]) == (str(decoder), 0.3)
    assert given["out"] == out and given["steps"] == 5
    assert "30.01%" in result.stdout

    as_json = dispfx("learn", decoder, "--ratio", 0.3, "--data", text, "--out", out, "--json")
    assert json.loads(as_json.stdout) == {
        "plan": str(out),
        "fingerprint": "f" * 64,
        "ratio": {"requested": 0.3, "achieved": 0.3001, "of": "blocks"},
        "sites": [{"name": "a", "size": 4, "kept": 2}],
    }


def test_learn_does_not_overwrite_a_plan(dispfx, replaced, tmp_path: Path):
    learn = replaced("run_learn")
    (tmp_path / "plan.safetensors").touch()
    result = dispfx("learn", "demo", "--ratio", 0.3, "--out", tmp_path / "plan.safetensors")
    assert result.exit_code == 2 and not learn.called


def test_apply_hands_on_model_plan_and_folder(dispfx, replaced, report: Report, tmp_path: Path, text: Path):
    apply = replaced("run_apply", report)
    plan = tmp_path / "plan.safetensors"
    plan.write_bytes(b"any")
    result = dispfx("apply", "demo", plan, "--out", tmp_path / "out", "--eval-data", text, "--export", "none")
    assert result.exit_code == 0, result.output
    given = asked(apply)
    assert (given["model"], given["plan"], given["out"]) == ("demo", plan, tmp_path / "out")
    assert given["eval_data"] == [str(text)] and given["export"] == "none"


def test_apply_refuses_a_plan_that_is_not_there(dispfx, replaced, tmp_path: Path):
    apply = replaced("run_apply")
    result = dispfx("apply", "demo", tmp_path / "absent", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "plan file does not exist" in result.stderr and not apply.called


def test_the_command_that_gives_a_result_again_does_not_resume(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["dispfx", "compile", "demo", "--resume", "--out", "a b"])
    assert command_line() == "dispfx compile demo --out 'a b'"
