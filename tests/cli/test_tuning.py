"""finetune on the command line."""

import json
from pathlib import Path

import pytest

from dispfx.report import Protocol, Tuning
from dispfx.settings.verb_settings import TuneSettings
from tests.cli.asked import asked

TOLD = Tuning(
    "demo", "text.txt", 96, 5.0, 4.0, Protocol("text.txt", 128, 2, 254, 0.1), 8, 16.0, 1e-3, 5, 2, 16, 3
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    (tmp_path / "text.txt").write_text("text")
    return folder


def test_finetune_hands_on_every_option(dispfx, replaced, written: Path):
    run = replaced("finetune", TOLD)
    text, out = written.with_name("text.txt"), written.with_name("out")
    result = dispfx(
        "finetune", written, "--data", text, "--out", out, "--merge", "--rank", 8, "--alpha", 16,
        "--steps", 5, "--batch-size", 2, "--seq-len", 16, "--eval-data", text, "--eval-windows", 2,
        "--dtype", "float32", "--device", "cpu", "--save-every", 3, "--resume",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    given = asked(run)
    chosen = TuneSettings(rank=8, alpha=16.0, steps=5, batch_size=2, seq_len=16)
    assert run.call_args.args[0].tuning == chosen and given["merge"] is True
    assert (given["dtype"], given["device"], given["eval_windows"]) == ("float32", "cpu", 2)
    assert (given["save_every"], given["resume"]) == (3, True)
    assert run.call_args.kwargs["command"].startswith(f"dispfx finetune {written} --data")
    assert "perplexity 5.000 before and 4.000 after" in result.stdout and f"written: {out}" in result.stdout


def test_finetune_as_json_is_one_document_and_quiet_says_nothing(dispfx, replaced, written: Path):
    replaced("finetune", TOLD)
    words = ["finetune", written, "--data", written.with_name("text.txt"), "--out", written.with_name("out")]
    shown = json.loads(dispfx(*words, "--json").stdout)
    assert (shown["before"], shown["after"], shown["merged"], shown["rank"]) == (5.0, 4.0, False, 8)
    assert dispfx(*words, "--quiet").output == ""


def test_finetune_refuses_wrong_words_first(dispfx, replaced, written: Path, tmp_path: Path):
    run = replaced("finetune")
    text = written.with_name("text.txt")
    for words in (
        [tmp_path / "absent", "--data", text, "--out", tmp_path / "out"],
        [written, "--data", tmp_path / "absent.txt", "--out", tmp_path / "out"],
        [written, "--data", text, "--out", written],
        [written, "--out", tmp_path / "out"],
    ):
        assert dispfx("finetune", *words).exit_code == 2
    assert not run.called


def test_an_interrupted_run_says_how_to_go_on(dispfx, replaced, written: Path):
    replaced("finetune", error=KeyboardInterrupt())
    words = ["finetune", written, "--data", written.with_name("text.txt"), "--out", written.with_name("out")]
    result = dispfx(*words)
    assert result.exit_code == 130 and "no state was saved yet" in result.stderr
    written.with_name("out.state").mkdir()
    result = dispfx(*words)
    assert result.exit_code == 130 and f"the state is in {written.with_name('out.state')}" in result.stderr
    assert "--resume" in result.stderr
