"""A disk that is full is told of as such, whichever library met it."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dispfx.errors import OutputError
from dispfx.files.disk import disk_fault, replacing, writing


def full_by_python() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"a")


def full_by_safetensors() -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_by_torch() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        torch.save(torch.zeros(2), file)


@pytest.mark.parametrize("write", [full_by_python, full_by_safetensors, full_by_torch])
def test_a_full_disk_is_the_users_to_mend(write, tmp_path):
    with (
        pytest.raises(OutputError, match=r"No space left|a write failed") as raised,
        writing(tmp_path),
    ):
        write()
    assert raised.value.exit_code == 2 and str(tmp_path) in str(raised.value)


def test_safetensors_says_it_in_those_words(tmp_path):
    """It is read from its message, which a new version could change."""
    with pytest.raises(SafetensorError) as raised:
        save_file({"a": torch.zeros(2)}, tmp_path)  # a folder
    assert "os error 21" in str(raised.value)
    assert disk_fault(raised.value) is None, "not the disk's fault"


def test_other_errors_stay_what_they_are():
    for error in (OSError(errno.ENOENT, "missing"), RuntimeError("shape"), SafetensorError("header")):
        assert disk_fault(error) is None
        with pytest.raises(type(error)), writing("a"):
            raise error


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(OutputError), replacing(target) as partial:
        partial.write_text("new")
        full_by_python()
    assert target.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["a"]
