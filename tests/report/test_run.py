"""A folder read back."""

import json
import math
from pathlib import Path

import pytest

from dispfx.errors import DataError, OutputError
from dispfx.report.run import read_run, read_steps
from tests.report.runs import plan_of, step, write_run


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
