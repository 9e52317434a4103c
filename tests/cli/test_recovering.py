"""recover and finetune on the command line."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

import dispfx as library
from dispfx.api import verify
from dispfx.report import Tuning, load_report
from dispfx.settings.recovery_settings import RecoverySettings
from tests.api.conftest import MODEL, RATIO, random_tokens
from tests.cli.asked import asked
from tests.processes import started
from tests.programs import relative_error, token_ids
from tests.report.test_tuning import TOLD


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "report.json").write_text("{}")
    (tmp_path / "text.txt").write_text("text")
    return folder


def words(written: Path) -> list:
    return [
        written,
        "--dense",
        "demo",
        "--data",
        written.with_name("text.txt"),
        "--out",
        written.with_name("out"),
    ]


def test_recover_hands_on_every_option(dispfx, replaced, written: Path):
    run = replaced("run_recover", TOLD)
    text = written.with_name("text.txt")
    result = dispfx(
        "recover", *words(written), "--train", "scales", "--steps", 5, "--lr", 0.1, "--batch-size", 2,
        "--seq-len", 16, "--measure-every", 2, "--patience", 3, "--eval-data", text, "--eval-windows", 2,
        "--device", "cpu", "--save-every", 3, "--seed", 4, "--resume",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    given = asked(run)
    chosen = RecoverySettings(
        train="scales",
        steps=5,
        lr=0.1,
        batch_size=2,
        seq_len=16,
        measure_every=2,
        patience=3,
        seed=4,
        save_every=3,
    )
    assert run.call_args.args[0].recovery == chosen and given["dense"] == "demo"
    assert (given["device"], given["eval_windows"], given["resume"]) == ("cpu", 2, True)
    assert run.call_args.kwargs["command"].startswith(f"dispfx recover {written} --dense demo --data")
    assert "KL to the dense decoder 0.9000 before and 0.4000 after" in result.stdout
    assert f"written: {written.with_name('out')}" in result.stdout


def test_finetune_is_recovery_by_adapters(dispfx, replaced, written: Path):
    run = replaced("run_recover", TOLD)
    assert dispfx("finetune", *words(written), "--merge", "--rank", 8, "--alpha", 16).exit_code == 0
    assert asked(run)["train"] == "lora" and asked(run)["merge"] is True
    assert run.call_args.args[0].recovery == RecoverySettings(train="lora", rank=8, alpha=16.0)
    assert dispfx("finetune", *words(written), "--train", "scales").exit_code == 2


def test_recover_as_json_is_one_document_and_quiet_says_nothing(dispfx, replaced, written: Path):
    replaced("run_recover", TOLD)
    shown = json.loads(dispfx("recover", *words(written), "--json").stdout)
    assert (shown["kl_before"], shown["kl_after"], shown["merged"], shown["rank"]) == (0.9, 0.4, True, 8)
    assert json.loads(dispfx("finetune", *words(written), "--json").stdout)["merged"] is False
    assert dispfx("recover", *words(written), "--quiet").output == ""


def test_recover_refuses_wrong_words_first(dispfx, replaced, written: Path, tmp_path: Path):
    run = replaced("run_recover")
    text = written.with_name("text.txt")
    for given in (
        [tmp_path / "absent", "--dense", "demo", "--data", text, "--out", tmp_path / "out"],
        [written, "--dense", "demo", "--data", tmp_path / "absent.txt", "--out", tmp_path / "out"],
        [written, "--dense", "demo", "--data", text, "--out", written],
        [written, "--dense", "demo", "--out", tmp_path / "out"],
        [written, "--data", text, "--out", tmp_path / "out"],
    ):
        assert dispfx("recover", *given).exit_code == 2
    assert not run.called


def test_an_interrupted_run_says_how_to_go_on(dispfx, replaced, written: Path):
    replaced("run_recover", error=KeyboardInterrupt())
    result = dispfx("recover", *words(written))
    assert result.exit_code == 130 and "no state was saved yet" in result.stderr
    written.with_name("out.state").mkdir()
    result = dispfx("recover", *words(written))
    assert result.exit_code == 130 and f"the state is in {written.with_name('out.state')}" in result.stderr
    assert "--resume" in result.stderr


def test_compile_hands_recovery_on(dispfx, replaced, report, tmp_path: Path):
    run = replaced("run_compile", report)
    out = tmp_path / "out"
    given = ["compile", "demo", "--ratio", 0.5, "--recover", "weights", "--recover-steps", 7]
    given += ["--seed", 5, "--out", out]
    assert dispfx(*given).exit_code == 0
    chosen = run.call_args.args[0].recovery
    assert chosen == RecoverySettings(train="weights", steps=7, seed=5)
    assert dispfx("compile", "demo", "--ratio", 0.5, "--out", out).exit_code == 0
    assert run.call_args.args[0].recovery is None


def test_the_record_of_a_run_has_what_is_shown():
    assert isinstance(TOLD, Tuning) and TOLD.kept


_LEARNING = ["--ratio", str(RATIO), "--steps", "3", "--seq-len", "16", "--batch-size", "2", "--align", "1"]
_TRAINING = ["--steps", "6", "--lr", "1e-3", "--seq-len", "16", "--batch-size", "2"]


def launched(*given: object) -> None:
    """Run a command by two processes."""
    with started(["dispfx", *map(str, given), "--launch", "2"], together=True) as process:
        said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said


def told_by(folder: Path) -> Tuning:
    told = load_report(folder / "report.json").tuned
    assert told is not None and told.kept
    return told


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_recover_what_one_does(tmp_path: Path):
    text = tmp_path / "tokens.safetensors"
    save_file({"tokens": random_tokens()}, text)
    compiled = tmp_path / "compiled"
    launched("compile", MODEL, *_LEARNING, "--data", text, "--recover", "weights", "--recover-steps", 6,
             "--out", compiled)  # fmt: skip
    assert not compiled.with_name("compiled.state").exists()
    assert all(line.holds for line in verify(compiled)) and told_by(compiled).steps == 6

    plan = compiled / "plan.safetensors"
    library.api.apply(MODEL, plan, data=text, out=tmp_path / "pruned")
    words = ["--dense", MODEL, "--data", text, *_TRAINING]
    launched("recover", tmp_path / "pruned", *words, "--out", tmp_path / "two")
    found = library.recover(
        tmp_path / "pruned", dense=MODEL, data=text, out=tmp_path / "one", steps=6, lr=1e-3, seq_len=16,
        batch_size=2,
    )  # fmt: skip
    told = told_by(tmp_path / "two")
    assert told.kl_after == pytest.approx(found.kl_after, rel=1e-4) and found.kl_after < found.kl_before
    ids = token_ids(2, 9)
    one, two, before = (library.load(tmp_path / name)(ids) for name in ("one", "two", "pruned"))
    assert relative_error(two, one) < 1e-5 < 1e-4 < relative_error(before, one)
