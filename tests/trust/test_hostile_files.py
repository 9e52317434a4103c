"""Files that someone has spoilt, or made to do harm, are refused in words; what fuzzing found stays found.

On record are at least 100,000 inputs of `tests.trust.fuzzing`; here are two thousand, or as many as
DISPFX_INPUTS says.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dispfx.deploy.exported import count_parameters
from dispfx.deploy.onnx.files import check_external_data, load_model, takes_cache
from dispfx.deploy.weights import INDEX_FILE, read_tensors
from dispfx.errors import DataError, OutputError
from dispfx.files.json_text import parse_json
from dispfx.learning.state import STATE_FILE, Position, load_state, save_state
from dispfx.plan.latency_table import read_costs
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.report.page import write_page
from dispfx.report.run import read_run
from tests.command_line import run
from tests.report.runs import write_run
from tests.trust.hostile import onnx_model, zipped

INPUTS = int(os.environ.get("DISPFX_INPUTS", "2000"))
DEEP = "[" * 200_000
LONG = "x" * 300 + ".safetensors"
ODD_ROWS = ("1", '{"speedup": "fast"}', '{"speedup": NaN}')
ODD_PLACES = (
    "../outside",
    "/etc/hostname",
    "",
    "a/../../outside",
    "link/outside",
    "nul\0",
    "loop/x",
    "escape",
)
ODD_STATES: list[dict[str, object]] = [
    {"position": {"step": "1"}},
    {"position": {"step": 10**30}},
    {"identity": {"settings": None, "budget": {}}},
]


@pytest.mark.long
def test_spoilt_files_and_wrong_words_are_refused_in_words():
    command = [sys.executable, "-W", "ignore", "-m", "tests.trust.fuzzing", "--inputs", str(INPUTS)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["inputs"] >= 0.95 * INPUTS and not record["faults"]
    for kind, counts in record["kinds"].items():
        assert counts.get("refused", 0), f"no input of {kind} was refused, so they were not spoilt"


def test_every_reader_of_json_from_others_uses_the_one_that_knows_how_it_fails():
    source = Path(__file__).parents[2] / "dispfx"
    users = {path.name for path in source.rglob("*.py") if "json.loads(" in path.read_text(encoding="utf-8")}
    # The first is that reader; the other two read what this process has written itself.
    assert users == {"json_text.py", "state.py"}


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, b"\xff", "{", "", "[1" + "0" * 400 + "]"])
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", [DEEP, "\udcff", "null", '{"seconds": 1}'])
@pytest.mark.parametrize("read", [load_report, read_costs])
def test_reports_and_costs_of_odd_json_are_data_errors(
    read: Callable[[Path], object], text: str, tmp_path: Path
):
    path = tmp_path / "file.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError):
        read(path)


def test_costs_of_infinitely_many_tokens_are_refused(tmp_path: Path):
    table = {"device": "", "dtype": "", "tokens": float("inf"), "rows": [1], "columns": [1]}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**table, "seconds": [[1.0]], "selection_seconds": 0.0}), encoding="utf-8")
    with pytest.raises(DataError, match="not a latency table"):
        read_costs(path)


@pytest.mark.parametrize("header", [DEEP, "null", "[]", '{"schema_version": 1, "sites": 3}'])
def test_a_plan_with_an_odd_header_is_a_data_error(header: str, tmp_path: Path):
    save_file({"a": torch.zeros(1, dtype=torch.int32)}, tmp_path / "plan.safetensors", {"dispfx": header})
    with pytest.raises(DataError, match="not a plan"):
        Plan.load(tmp_path / "plan.safetensors")


@pytest.mark.parametrize("claims", [{"size": 10**12}, {"size": 8, "experts": 10**12}, {"size": 2**31}])
def test_a_plan_that_claims_a_trillion_features_is_refused(claims: dict[str, int], tmp_path: Path):
    header = {"schema_version": 1, "fingerprint": "f", "achieved": 0.5, "seed": 0, "versions": {}}
    header |= {"budget": {"ratio": 0.5, "of": "blocks", "align": 1}}
    path = tmp_path / "plan.safetensors"
    text = json.dumps({**header, "sites": [{"name": "a", "keys": ["w:0"], **claims}]})
    save_file({"a": torch.arange(2, dtype=torch.int32)}, path, {"dispfx": text})
    with pytest.raises(DataError, match="not a plan"):
        Plan.load(path)


def test_a_header_that_claims_more_bytes_than_there_are_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataError):
        read_tensors(tmp_path)


@pytest.mark.parametrize("speed", [DEEP, *(f'{{"rows": [{row}]}}' for row in ODD_ROWS)])
def test_an_odd_table_of_speeds_is_a_data_error(speed: str, tmp_path: Path):
    write_run(tmp_path)
    (tmp_path / "speed.json").write_text(speed, encoding="utf-8")
    with pytest.raises(DataError, match="not a speed table"):
        read_run(tmp_path)


@pytest.mark.parametrize("line", [b"null", b"\xff", DEEP.encode(), b'{"loss": 1e999, "budget_loss": []}'])
def test_an_odd_line_of_metrics_is_a_data_error(line: bytes, tmp_path: Path):
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(line)
    with pytest.raises(DataError, match="not a step of learning"):
        read_run(tmp_path)


def test_figures_that_are_not_finite_are_null_in_json(tmp_path: Path):
    write_run(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    report["ratio"]["achieved"] = float("nan")
    (tmp_path / "report.json").write_text(json.dumps(report), encoding="utf-8")
    result = run("compare", tmp_path, tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["runs"][0]["ratio"] is None


@pytest.mark.parametrize("change", ODD_STATES)
def test_a_state_with_odd_entries_is_a_data_error(change: dict[str, object], tmp_path: Path):
    identity = {"decoder": "d", "sites": [], "settings": {}, "budget": {}, "text": "t", "device": "cpu"}
    save_state(tmp_path, identity, Position(1), {"generator": torch.zeros(1)})
    path = tmp_path / STATE_FILE
    header = {"version": 1, "identity": identity, "position": {"step": 1}, **change}
    save_file({"generator": torch.zeros(1)}, path, {"dispfx": json.dumps(header)})
    with pytest.raises(DataError, match="state of an earlier run"):
        load_state(tmp_path, identity)


def test_a_damaged_parquet_file_that_would_end_pyarrows_process_is_refused():
    """In another process: what pyarrow throws there, nothing in this one could catch."""
    code = f"""
from pathlib import Path
from dispfx.errors import DataError
from dispfx.source.text.parquet import Parquet
for field in ("text", "number"):
    try:
        list(Parquet(Path({str(Path(__file__).with_name("damaged.parquet"))!r}), field).texts(1000))
    except DataError as error:
        print(error.problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "thrift" in done.stdout and "histogram" in done.stdout


@pytest.mark.parametrize("listed", ["{}", "[]", '{"config": {"w": {"is_param": true}}}', '{"config": 3}'])
def test_a_program_with_a_damaged_list_of_tensors_is_a_data_error(listed: str, tmp_path: Path):
    entry = "program/data/weights/model_weights_config.json"
    files = {entry: listed.encode(), "program/byteorder": b"little", "program/version": b"3"}
    (tmp_path / "program.pt2").write_bytes(zipped(files))
    with pytest.raises(DataError):
        count_parameters(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "x" * 10_000, "--prompt", "a"],
        ["verify", "x" * 10_000],
        ["inspect", "~nobody-of-that-name"],
    ],
)
def test_a_path_that_the_system_does_not_take_is_the_inputs_fault(words: list[str]):
    result = run(*words)
    assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.parametrize("place", ODD_PLACES)
def test_weights_of_an_onnx_model_outside_its_folder_are_refused(place: str, tmp_path: Path):
    folder = tmp_path / "onnx"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(bytes(48))
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    (folder / "escape").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "model.onnx").write_bytes(onnx_model(place))
    with pytest.raises(DataError, match="must be in the folder of the model"):
        check_external_data(folder / "model.onnx")


def test_weights_of_an_onnx_model_at_two_places_are_refused(tmp_path: Path):
    """One reader would take the first place and another the last."""
    import onnx

    (tmp_path / "model.onnx").write_bytes(onnx_model("../outside"))
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    entry = model.graph.initializer[0].external_data.add()
    entry.key, entry.value = "location", "inside"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match=r"'\.\./outside' and 'inside'"):
        check_external_data(tmp_path / "model.onnx")


def test_an_input_of_an_onnx_model_whose_name_is_no_text_is_passed_over(tmp_path: Path):
    (tmp_path / "model.onnx.data").write_bytes(bytes(48))
    raw = onnx_model("model.onnx.data").replace(b"past_key_values.0.key", b"\xff" * 21)
    (tmp_path / "model.onnx").write_bytes(raw)
    assert not takes_cache(tmp_path / "model.onnx")


@pytest.mark.parametrize(("offset", "length"), [("x", "48"), ("0", ""), ("1e3", "48")])
def test_an_onnx_model_whose_weights_lie_at_odd_places_of_a_file_is_refused(
    offset: str, length: str, tmp_path: Path
):
    (tmp_path / "model.onnx.data").write_bytes(bytes(48))
    (tmp_path / "model.onnx").write_bytes(onnx_model("model.onnx.data", offset, length))
    with pytest.raises(DataError, match="cannot be read"):
        load_model(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "..", LONG, "\0.safetensors"],
)
def test_an_index_that_names_weights_elsewhere_is_refused(file: str, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": file}}), encoding="utf-8")
    with pytest.raises(DataError, match="file of this folder"):
        read_tensors(folder)


@pytest.mark.parametrize("name", ["../../etc/passwd", "program/../evil", "/abs", "program/extra/code.py"])
def test_a_program_with_an_entry_elsewhere_is_refused(name: str, tmp_path: Path):
    (tmp_path / "program.pt2").write_bytes(zipped({"program/byteorder": b"little", name: b"x"}))
    with pytest.raises(DataError):
        count_parameters(tmp_path)


@pytest.mark.parametrize("name", ["pictures", ".report.html.partial.html"])
def test_a_link_in_a_folder_from_elsewhere_lets_nothing_be_written_outside(name: str, tmp_path: Path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    write_run(folder)
    target = outside if name == "pictures" else outside / "file"
    outside.mkdir()
    (folder / name).symlink_to(target)
    try:
        write_page(folder)
    except OutputError:
        assert name == "pictures"
    assert not list(outside.iterdir())
