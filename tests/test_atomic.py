"""Files that appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from dispfx.errors import OutputError
from dispfx.files import disk
from dispfx.files.disk import new_file, replacing
from tests.ended_process import left_behind


def test_a_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with replacing(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(RuntimeError), replacing(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_file_is_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        with replacing(tmp_path / "plan") as partial:
            os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "plan").stat().st_mode) == 0o640


def _no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "links are not supported")


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_never_takes_the_place_of_one_that_appeared(
    tmp_path: Path, monkeypatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    target = tmp_path / "own.safetensors"
    (tmp_path / "own-2.safetensors").write_text("another")
    with pytest.raises(OutputError, match="own-3"), new_file(target) as partial:
        partial.write_text("new")
        target.write_text("theirs")
    assert target.read_text() == "theirs" and (tmp_path / "own-3.safetensors").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["own-2.safetensors", "own-3.safetensors", "own.safetensors"]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_makes_its_folders_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    target = tmp_path / "a" / "b" / "plan"
    with new_file(target) as partial:
        partial.write_text("new")
    assert target.read_text() == "new" and os.listdir(target.parent) == ["plan"]


def test_a_new_file_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    left_behind(tmp_path / "plan").write_text("half")
    with new_file(tmp_path / "plan") as partial:
        partial.write_text("new")
    assert os.listdir(tmp_path) == ["plan"]


def test_what_another_container_is_making_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = left_behind(tmp_path / "plan")
    theirs.write_text("half")
    disk._visible.cache_clear()
    monkeypatch.setattr(disk, "_NUMBERING", tmp_path)
    with new_file(tmp_path / "plan") as partial:
        partial.write_text("new")
    assert sorted(os.listdir(tmp_path)) == ["plan", theirs.name]
    disk._visible.cache_clear()


def test_two_writers_of_one_new_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "plan"
    with pytest.raises(OutputError, match="plan-2"), new_file(target) as first:
        first.write_text("first")
        with new_file(target) as second:
            second.write_text("second")
    assert target.read_text() == "second" and (tmp_path / "plan-2").read_text() == "first"
