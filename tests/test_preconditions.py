"""Checks of a user's words that need nothing slow."""

from pathlib import Path

import pytest

import dispfx
from dispfx.errors import DataError, OutputError, SourceError
from dispfx.words.model_origin import origin_of
from dispfx.words.preconditions import check_files, check_folder


def test_every_form_of_model_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    for name in ("model.gguf", "CAPS.GGUF", "CAPS.JSON"):
        (tmp_path / name).touch()
    expected = {
        "demo": "demo",
        "./demo": "folder",
        str(tmp_path): "folder",
        "model.gguf": "gguf",
        "CAPS.GGUF": "gguf",
        "CAPS.JSON": "config",
        "package.module:function": "function",
        "module:Class.build": "function",
        "owner/name-1.5b": "hub",
        "name": "hub",
    }
    assert {spec: origin_of(spec) for spec in expected} == expected


@pytest.mark.parametrize("spec", ["", "a/b/c", "./x", "/x", "~/x", "../x", "x.gguf", "file.py:", "a b", "-x"])
def test_a_word_that_is_no_model_is_refused(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError):
        origin_of(spec)


def test_files_must_exist_and_hold_something(tmp_path: Path):
    good, empty = tmp_path / "good", tmp_path / "empty"
    good.write_text("x")
    empty.touch()
    check_files([good], "text")
    check_files([], "text")
    for bad in (empty, tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError) as refusal:
            check_files([good, bad], "text")
        assert refusal.value.where == str(bad)


def test_a_folder_of_ours_has_a_report(tmp_path: Path):
    for bad in (tmp_path, tmp_path / "absent"):
        with pytest.raises(OutputError):
            check_folder(bad)
    (tmp_path / "report.json").touch()
    check_folder(tmp_path)


def test_a_folder_with_an_adapter_alone_is_called_that(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for opened in (check_folder, dispfx.load):
        with pytest.raises(OutputError, match="only an adapter, and no decoder"):
            opened(tmp_path)
