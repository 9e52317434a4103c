"""What ran on the CPU, read from a profile; the profiles are written here, no GPU is needed."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dispfx.errors import DataError, VerificationError

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
read_placement = importlib.import_module("onnx_placement").read_placement
sys.path.pop(0)

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def node(
    operator: str, provider: str, inputs: list[Any], outputs: list[Any], name: str = ""
) -> dict[str, Any]:
    return {
        "operator": operator,
        "provider": provider,
        "in": inputs,
        "out": outputs,
        "name": name or operator,
    }


PRODUCT = node("MatMul", CUDA, [{"float16": [1, 5, 64]}, {"float16": [64, 64]}], [{"float16": [1, 5, 64]}])
SHAPE = node("Shape", CPU, [{"int64": [4, 2048]}], [{"int64": [1]}])
CONCAT = node("Concat", CPU, [{"int64": [1]}, {"int64": [1]}], [{"int64": [2]}])


def written(folder: Path, *runs: list[dict[str, Any]]) -> Path:
    events: list[dict[str, Any]] = []
    time = 0
    for run in runs:
        events.append({"cat": "Session", "name": "model_run", "ts": time, "dur": 100, "args": {}})
        for entry in run:
            time += 1
            arguments = {
                "op_name": entry["operator"],
                "provider": entry["provider"],
                "input_type_shape": entry["in"],
                "output_type_shape": entry["out"],
            }
            event = {"cat": "Node", "name": f"{entry['name']}_kernel_time", "ts": time, "args": arguments}
            events.append(event)
        time += 100
    path = folder / "profile.json"
    path.write_text(json.dumps(events))
    return path


def test_arithmetic_about_shapes_belongs_on_the_cpu(tmp_path: Path):
    placement = read_placement(written(tmp_path, [SHAPE, CONCAT, PRODUCT]))

    assert [entry.operator for entry in placement.on_cpu] == ["Concat", "Shape"]
    assert placement.misplaced == () and placement.nodes == 3
    placement.require()


@pytest.mark.parametrize(
    "wrong",
    [
        node("MatMul", CPU, [{"float": [1, 5, 64]}, {"float": [64, 64]}], [{"float": [1, 5, 64]}]),
        node("Gather", CPU, [{"float16": [1, 5, 64]}, {"int32": [40]}], [{"float16": [1, 5, 40]}]),
        node("Range", CPU, [{"int64": []}, {"int64": []}, {"int64": []}], [{"int64": [2048]}]),
        node("Cast", CPU, [{"int64": []}], [{"float": []}]),
    ],
    ids=lambda entry: entry["operator"],
)
def test_anything_else_there_is_named(tmp_path: Path, wrong: dict[str, Any]):
    placement = read_placement(written(tmp_path, [SHAPE, PRODUCT, wrong]))

    assert [entry.operator for entry in placement.misplaced] == [wrong["operator"]]
    with pytest.raises(VerificationError, match=wrong["operator"]):
        placement.require()


def test_a_copy_between_two_products_is_inside_the_layers(tmp_path: Path):
    copy = node("MemcpyToHost", CUDA, [{"int64": [1]}], [{"int64": [1]}])
    early, late = dict(copy, name="early"), dict(copy, name="late")
    inside = dict(copy, name="inside")
    other = dict(PRODUCT, name="other")

    placement = read_placement(written(tmp_path, [early, PRODUCT, inside, other, late]))

    assert [entry.name for entry in placement.copies_inside] == ["inside"]
    assert [entry.name for entry in placement.copies] == ["early", "late"]
    with pytest.raises(VerificationError, match="inside"):
        placement.require()


def test_the_last_run_counts(tmp_path: Path):
    wrong = node("Softmax", CPU, [{"float": [4, 5]}], [{"float": [4, 5]}])

    assert read_placement(written(tmp_path, [wrong, PRODUCT], [PRODUCT])).misplaced == ()
    assert len(read_placement(written(tmp_path, [PRODUCT], [PRODUCT, wrong])).misplaced) == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}'])
def test_a_file_that_is_no_profile_is_a_data_error(tmp_path: Path, content: str):
    (tmp_path / "profile.json").write_text(content)

    with pytest.raises(DataError):
        read_placement(tmp_path / "profile.json")
