"""A file of a decoder that was changed, lost or swapped is found by its digest."""

from pathlib import Path

import pytest

from dispfx.deploy.digests import changed, digests
from dispfx.errors import DataError

# Of the three bytes "abc", from FIPS 180-2.
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
DECODER = ("config.json", "model.safetensors", "onnx/model.onnx", "onnx/model.onnx.data", "program.pt2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*DECODER, "README.md", "report.json", "tokenizer.json", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("abc")
    return tmp_path


def test_files_that_hold_the_decoder_are_recorded_and_no_others(folder: Path):
    assert digests(folder) == dict.fromkeys(DECODER, ABC)
    assert changed(folder, digests(folder)) == []


def test_what_was_changed_lost_or_is_no_file_is_named(folder: Path):
    recorded = digests(folder)
    (folder / "model.safetensors").write_text("abd")
    (folder / "program.pt2").unlink()
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    (folder / "onnx" / "added.onnx").write_text("of a later export")
    assert changed(folder, recorded) == ["config.json", "model.safetensors", "program.pt2"]


def test_a_link_to_the_same_bytes_is_the_same_file(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    recorded = digests(folder)
    blob = tmp_path_factory.mktemp("cache") / "blob"
    (folder / "program.pt2").rename(blob)
    (folder / "program.pt2").symlink_to(blob)
    assert changed(folder, recorded) == []


@pytest.mark.parametrize("name", ["/etc/hostname", "../other/model.safetensors", "onnx/../../x", "a\0b"])
def test_a_report_that_names_files_elsewhere_is_refused(folder: Path, name: str):
    with pytest.raises(DataError, match="outside of its folder"):
        changed(folder, {name: ABC})


def test_a_name_that_no_file_system_takes_is_a_file_that_is_missing(folder: Path):
    assert changed(folder, {"x" * 10_000: ABC}) == ["x" * 10_000]
