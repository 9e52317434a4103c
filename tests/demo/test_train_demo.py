"""The training script, with sizes too small to learn anything."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("train_demo")


def smoke_run(script: Any, out: Path, *more: str) -> None:
    script.main(["--smoke", "--steps", "3", "--device", "cpu", "--out", str(out), *more])


def test_a_smoke_run_writes_a_whole_folder_and_nothing_beside_it(script: Any, tmp_path: Path):
    out = tmp_path / "decoder"
    smoke_run(script, out)
    assert [path.name for path in tmp_path.iterdir()] == ["decoder"]
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "3 steps, 3,072 tokens" in card and "| copy | 0.000 |" in card


def test_an_existing_folder_is_refused_before_any_training(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="exists"):
        smoke_run(script, tmp_path)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_finished_leaves_the_old_one(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "decoder"
    out.mkdir()
    (out / "old").write_text("kept")
    monkeypatch.setattr("demo_folder.name_tokenizer_class", raises(OSError("disk full")))
    tokenizer = script.wrap(script.train_tokenizer(20_000), 1024)
    with pytest.raises(OSError, match="disk full"):
        script.write_folder(out, script.build_decoder(0), tokenizer, "card")
    assert [path.name for path in tmp_path.iterdir()] == ["decoder"]
    assert (out / "old").read_text() == "kept"


def raises(error: Exception) -> Callable[[object], None]:
    def fail(_: object) -> None:
        raise error

    return fail


def test_every_second_window_begins_a_line_and_targets_follow_inputs(script: Any):
    newline = 9
    # Lines of seven tokens; every token's value tells its place in the line.
    stream = np.tile(np.array([1, 2, 3, 4, 5, 6, newline], dtype=np.uint16), 1000)
    settings = script.Settings(steps=7, batch=8, length=24)
    for inputs_BT, targets_BT in script.batches(iter([stream]), newline, settings):
        assert inputs_BT.shape == (8, 24)
        assert (inputs_BT[::2, 0] == 1).all()
        assert (inputs_BT[:, 1:] == targets_BT[:, :-1]).all()


def test_the_learning_rate_warms_up_and_ends_near_zero(script: Any):
    settings = script.Settings(steps=1000, warmup=100, lr=1.0)
    rates = [settings.learning_rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01) and max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(0.01, abs=1e-3)
