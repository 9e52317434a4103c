"""A folder read back."""

import json
import math
import shutil
from pathlib import Path

import pytest

from dispfx.errors import DataError, OutputError
from dispfx.report.evaluation import Evaluation, write_evaluation
from dispfx.report.page import write_page
from dispfx.report.run import read_run, read_steps
from dispfx.report.run_comparison import run_notes
from dispfx.report.speed import write_speed
from tests.report.runs import plan_of, step, with_weights, write_run
from tests.report.test_speed import FACTS, row


def test_a_run_is_what_the_folder_says(tmp_path: Path):
    run = read_run(write_run(tmp_path / "one"))
    assert run.name == "one" and run.report.ratio.requested == 0.3 and run.speed is None
    assert run.plan.selections == plan_of().selections
    assert run.steps == tuple(step(number) for number in range(1, 21))


def test_a_folder_without_learning_or_a_file_is_told_apart(tmp_path: Path):
    folder = write_run(tmp_path, steps=0)
    assert read_run(folder).steps == ()
    (folder / "plan.safetensors").unlink()
    with pytest.raises(OutputError, match=r"no plan\.safetensors"):
        read_run(folder)


def test_null_is_a_number_that_is_none_and_another_line_is_named(tmp_path: Path):
    folder = write_run(tmp_path, steps=1)
    file = folder / "metrics.jsonl"
    values = json.loads(file.read_text()) | {"loss": None, "of_a_later_version": 1}
    file.write_text(json.dumps(values) + "\n")
    assert math.isnan(read_steps(file)[0].loss)
    file.write_text(json.dumps(values) + "\n{\n")
    with pytest.raises(DataError) as caught:
        read_steps(file)
    assert caught.value.where == f"{file}:2"


@pytest.mark.parametrize("text", ["[]", "{}", "{"])
def test_a_damaged_table_of_speeds_is_refused(tmp_path: Path, text: str):
    folder = write_run(tmp_path)
    (folder / "speed.json").write_text(text)
    with pytest.raises(DataError, match="not a speed table"):
        read_run(folder)


def measured(folder: Path, decoder: str | None) -> Path:
    """Write both measurements into a folder, as those of a decoder."""
    write_speed(folder, [row()], FACTS, decoder=decoder)
    write_evaluation(Evaluation("out/run", decoder=decoder), folder)
    return folder


def test_measurements_survive_a_copy_of_the_folder(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    measured(folder, with_weights(folder))
    run = read_run(shutil.copytree(folder, tmp_path / "copy"))
    assert run.speed is not None and run.evaluation is not None and run.left_out == ()


@pytest.mark.parametrize("of", ["another decoder", "weights before", "nobody", "a folder without digests"])
def test_measurements_of_another_decoder_are_left_out_with_a_sentence(tmp_path: Path, of: str):
    folder, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    measured(folder, None if of == "nobody" else with_weights(other, "of another"))
    if of == "weights before":
        measured(folder, with_weights(folder, "before"))
    if of != "a folder without digests":
        with_weights(folder)
    run = read_run(folder)
    assert run.speed is None and run.evaluation is None
    expected = "does not say which decoder" if of == "nobody" else "of another decoder, or of other weights"
    assert [line.split()[0] for line in run.left_out] == ["speed.json", "eval.json"]
    assert all(expected in line for line in run.left_out)
    assert [f"run: {line}" for line in run.left_out] == run_notes([run])
    write_page(folder)
    shown = (folder / "report.html").read_text(encoding="utf-8")
    assert run.left_out[0] in shown and "Measured by" not in shown and "<h2>Speed" not in shown
