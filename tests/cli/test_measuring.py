"""bench on the command line."""

import json
from pathlib import Path

import pytest

from dispfx.api.benching import Benched
from tests.cli.asked import asked
from tests.report.runs import with_weights, write_run
from tests.report.test_speed import FACTS, row


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text("{}")
    return tmp_path


def test_bench_passes_on_what_was_chosen(dispfx, replaced, written: Path):
    bench = replaced("bench", Benched((row(),), FACTS))
    result = dispfx(
        "bench", written, "--dense", "demo", "--batch", 1, "--batch", 8, "--prompt", 64, "--past", 32,
        "--mode", "compiled", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    chosen = asked(bench)
    assert chosen["model"] == str(written)
    assert (chosen["dense"], list(chosen["batch"])) == ("demo", [1, 8])
    assert (list(chosen["prompt"]), list(chosen["past"])) == ([64], [32])
    assert (chosen["mode"], chosen["device"], chosen["runtime"]) == ("compiled", "cpu", "torch")
    assert "| 1.60 | 2.00 | 80% |" in result.stdout


def test_bench_leaves_the_defaults_to_the_compiler(dispfx, replaced, written: Path):
    bench = replaced("bench", Benched((), FACTS))
    assert dispfx("bench", written).exit_code == 0
    chosen = asked(bench)
    assert chosen["batch"] == chosen["prompt"] == chosen["past"] == ()
    assert chosen["mode"] == "both" and chosen["dense"] is None


def test_bench_prints_one_json_document_and_writes_both_files(dispfx, replaced, written: Path):
    replaced("bench", Benched((row(),), FACTS))
    result = dispfx("bench", written, "--json", "--out", written / "speed")
    assert json.loads(result.stdout)["rows"][0]["speedup"] == 1.6
    assert {file.name for file in (written / "speed").iterdir()} == {"speed.md", "speed.json"}


def test_bench_of_no_folder_is_the_inputs_fault(dispfx, tmp_path: Path):
    assert dispfx("bench", tmp_path / "missing").exit_code == 2
    assert dispfx("bench", tmp_path, "--batch", 0).exit_code == 2


def test_bench_refuses_a_number_that_no_shape_has(dispfx, replaced, written: Path):
    bench = replaced("bench", Benched((row(),), FACTS))
    result = dispfx("bench", written, "--batch", "99999999999999999999")
    assert result.exit_code == 2 and "at most 2,147,483,647" in " ".join(result.stderr.split())
    assert not bench.called


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_file_in_place_of_the_folder_is_refused_before_a_step_is_timed(
    dispfx, replaced, written: Path, place: str
):
    bench = replaced("bench", Benched((row(),), FACTS))
    (written / "taken").write_text("a file")
    result = dispfx("bench", written, "--out", written / place)
    assert result.exit_code == 2 and "this is a file" in result.stderr
    assert not bench.called and (written / "taken").read_text() == "a file"


def test_speed_is_not_written_into_the_folder_of_another_decoder(dispfx, replaced, tmp_path: Path):
    bench = replaced("bench", Benched((row(),), FACTS))
    one, copy, other = (write_run(tmp_path / name) for name in ("one", "copy", "other"))
    own = with_weights(one)
    assert with_weights(copy) == own != with_weights(other, "of another")
    result = dispfx("bench", one, "--out", other)
    assert result.exit_code == 2 and "the folder of another decoder" in result.stderr
    assert not bench.called and not (other / "speed.json").exists()
    for folder in (one, copy):
        assert dispfx("bench", one, "--out", folder).exit_code == 0
        assert json.loads((folder / "speed.json").read_text())["decoder"] == own
