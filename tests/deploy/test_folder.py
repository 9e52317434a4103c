import errno
import os
from pathlib import Path

import pytest

from dispfx.deploy.folder import new_folder, refuse_existing
from dispfx.errors import OutputError
from dispfx.files.disk import partial_beside
from tests.ended_process import left_behind


def test_the_folder_appears_only_when_the_work_is_done(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_folder(out) as partial:
        (partial / "onnx").mkdir()
        (partial / "onnx" / "a.txt").write_text("a")
        assert partial.parent == out.parent
        assert not out.exists()

    assert (out / "onnx" / "a.txt").read_text() == "a"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out") as partial:
        (partial / "a.txt").write_text("a")
        raise error

    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_output_error_and_another_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No space left"), new_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ConnectionError), new_folder(tmp_path / "out"):
        raise ConnectionError

    assert os.listdir(tmp_path) == []


def test_an_existing_folder_file_or_link_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(os.listdir(tmp_path))

    for name in before:
        with pytest.raises(OutputError, match="must not exist"):
            refuse_existing(tmp_path / name)
        with pytest.raises(OutputError, match="must not exist"), new_folder(tmp_path / name):
            pytest.fail("the work must not start")

    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_only_a_folder_of_dispfx_is_said_to_be_removable(tmp_path: Path) -> None:
    model, own, plain = tmp_path / "QWEN", tmp_path / "own", tmp_path / "file"
    for folder in (model, own):
        folder.mkdir()
    plain.write_text("mine")
    (model / "config.json").write_text("{}")
    for name in ("plan.safetensors", "report.json"):
        (own / name).write_text("{}")
    hints = {}
    for path in (model, own, plain, own / "report.json"):
        with pytest.raises(OutputError) as error:
            refuse_existing(path)
        hints[path] = error.value.hint
    assert hints[model] == hints[plain] == "name another folder with `out`"
    assert hints[own] == "name another folder with `out`, or remove this one"
    assert hints[own / "report.json"] == "move it elsewhere to write it again"


def test_a_folder_that_appears_during_the_work_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError), new_folder(out) as partial:
        (partial / "a.txt").write_text("ours")
        out.mkdir()
        (out / "a.txt").write_text("theirs")

    assert (out / "a.txt").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out"]


def test_a_parent_that_is_a_file_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(OutputError, match="cannot be written"), new_folder(tmp_path / "file" / "out"):
        pytest.fail("the work must not start")


def test_the_folder_has_the_permissions_of_an_ordinary_one(tmp_path: Path) -> None:
    (tmp_path / "ordinary").mkdir()
    with new_folder(tmp_path / "out"):
        pass

    assert (tmp_path / "out").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    abandoned = left_behind(tmp_path / "out")
    others = [
        partial_beside(tmp_path / "out").name,
        left_behind(tmp_path / "out2").name,
        "out.partial-x",
        "out.state",
    ]
    for name in [abandoned.name, *others]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("a")
    with new_folder(tmp_path / "out"):
        assert not abandoned.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *others])
