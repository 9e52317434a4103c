import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dispfx.deploy import weights
from dispfx.deploy.weights import INDEX_FILE, WEIGHTS_FILE, write_tensors
from dispfx.errors import DataError, OutputError


def some_parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layers.0.weight": torch.randn(4, 6, generator=generator),
        "layers.0.bias": torch.randn(4, generator=generator).to(torch.bfloat16),
        "layers.1.weight": torch.randn(3, 4, generator=generator).to(torch.float16),
    }


def some_buffers() -> dict[str, Tensor]:
    return {
        "dispfx_index.layers.0.read": torch.tensor([0, 2, 5], dtype=torch.int32),
        "scale": torch.tensor([1.5, 2.5]),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tensors(tmp_path, some_parameters(), some_buffers())
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_tensors(tmp_path, some_parameters(), some_buffers(), max_shard_bytes=100)
    return tmp_path


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_what_was_written_is_read_back_bit_for_bit(folder: Path) -> None:
    assert sorted(os.listdir(folder)) == [WEIGHTS_FILE, INDEX_FILE]
    assert same_bits(weights.read_tensors(folder), {**some_parameters(), **some_buffers()})
    assert list(weights.read_tensors(folder, ["scale"])) == ["scale"]


def test_a_single_file_has_an_index_too_which_keeps_engines_from_reading_the_plan(folder: Path) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(some_parameters()) | set(some_buffers())
    assert set(index["weight_map"].values()) == {WEIGHTS_FILE}


def test_shards_hold_the_same_tensors_below_the_limit_and_an_index(sharded: Path) -> None:
    files = weights.weight_files(sharded)

    assert len(files) > 1
    assert {file.name for file in files} | {INDEX_FILE} == set(os.listdir(sharded))
    assert same_bits(weights.read_tensors(sharded), {**some_parameters(), **some_buffers()})
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 100
    index = json.loads((sharded / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 96 + 8 + 24 + 12 + 8


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_only_parameters_are_counted_and_all_bytes(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)

    assert weights.count_parameters(folder) == 24 + 4 + 12
    sizes = [(folder / name).stat().st_size for name in os.listdir(folder) if name != INDEX_FILE]
    assert weights.count_bytes(folder) == sum(sizes)


def test_headers_are_read_without_the_tensors(folder: Path) -> None:
    header = weights.read_headers(folder)["layers.0.bias"]

    assert (header.shape, header.dtype, header.is_parameter) == ((4,), torch.bfloat16, True)
    assert not weights.read_headers(folder)["scale"].is_parameter
    assert not weights.read_headers(folder)["dispfx_index.layers.0.read"].is_parameter


def test_a_view_is_written_without_its_base(tmp_path: Path) -> None:
    base = torch.arange(10_000.0)
    rows = {"a": base[:10], "b": base[10:30].view(4, 5).t()}

    write_tensors(tmp_path, rows, {})

    assert same_bits(weights.read_tensors(tmp_path), {name: row.contiguous() for name, row in rows.items()})
    assert weights.count_bytes(tmp_path) < 1_000


def test_the_header_says_pt_which_accelerate_asks_for(sharded: Path) -> None:
    files = weights.weight_files(sharded)
    assert len(files) > 1
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "", "x.bin", 3, None]
)
def test_an_index_cannot_name_a_file_elsewhere(sharded: Path, name: object) -> None:
    save_file({"scale": torch.ones(2)}, sharded.parent / "outside.safetensors")
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["scale"] = name
    (sharded / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(DataError) as error:
        weights.read_tensors(sharded)

    assert INDEX_FILE in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "\udcff", "[" * 100_000])
def test_a_damaged_index_is_a_data_error(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(DataError):
        weights.read_headers(sharded)


def test_an_index_that_disagrees_with_its_files_is_a_data_error(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    del index["weight_map"]["layers.0.bias"]
    (sharded / INDEX_FILE).write_text(json.dumps(index))

    with pytest.raises(DataError, match=r"layers\.0\.bias"):
        weights.read_headers(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    missing = weights.weight_files(sharded)[-1]
    missing.unlink()

    with pytest.raises(DataError, match=missing.name):
        weights.read_headers(sharded)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_file_is_a_data_error(folder: Path, keep: int) -> None:
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(content[:keep])

    with pytest.raises(DataError, match="cannot be read"):
        weights.read_tensors(folder)


def test_a_pointer_of_git_lfs_is_called_that_and_a_cut_file_is_to_be_copied_again(folder: Path) -> None:
    content = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n"
    )
    with pytest.raises(DataError, match="is a git-lfs pointer") as error:
        weights.read_tensors(folder)
    assert error.value.hint == f"git -C {folder} lfs pull"
    (folder / WEIGHTS_FILE).write_bytes(content[:-1])
    with pytest.raises(DataError) as error:
        weights.read_tensors(folder)
    assert "copy that file again" in str(error.value)


def test_a_dtype_that_no_decoder_has_is_a_data_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / WEIGHTS_FILE)

    with pytest.raises(DataError):
        weights.read_headers(tmp_path)


def test_an_empty_folder_and_a_missing_name_are_data_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match="missing"):
        weights.read_headers(tmp_path / "empty")
    with pytest.raises(DataError, match=r"layers\.7"):
        weights.read_tensors(folder, ["layers.7"])


def test_a_folder_that_is_gone_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_tensors(tmp_path / "gone", some_parameters(), {})
