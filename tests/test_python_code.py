"""Python code that MODEL names without a function is read, never run, and its functions are offered."""

from pathlib import Path

import pytest

from dispfx.errors import SourceError
from dispfx.source import load_source
from dispfx.words.model_origin import origin_of
from dispfx.words.python_code import suggestion_for

CODE = """
raise RuntimeError("imported")

def build(): ...
def _own(): ...
def takes_one(size): ...
def takes_a_word(*, size): ...
def large(layers=48, *, width=8192): ...
async def later(): ...
class Decoder:
    def method(self): ...
"""
OFFER = "mine.py is Python code: name its function, mine:build or mine:large"


@pytest.fixture(autouse=True)
def _code_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "inner" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "inner" / "deep" / "code.py").write_text("def small(): ...")
    (tmp_path / "empty.py").write_text("number = 3")
    (tmp_path / "quiet.py").write_text("def build(): ...")
    (tmp_path / "broken.py").write_text("def build(:")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("mine", OFFER),
        ("mine.py", OFFER),
        ("./mine.py", OFFER),
        ("mine:", OFFER),
        ("mine:bild", OFFER),
        ("mine.py:build", "mine.py is Python code: name its function, mine:build"),
        ("inner.deep.code", "inner/deep/code.py is Python code: name its function, inner.deep.code:small"),
        ("inner/deep/code.py", "inner/deep/code.py is Python code: name its function, inner.deep.code:small"),
        (
            "empty",
            "empty.py is Python code: write a function without arguments in it, and name it empty:FUNCTION",
        ),
    ],
)
def test_functions_that_take_no_arguments_are_offered(spec: str, told: str):
    assert suggestion_for(spec) == told


@pytest.mark.parametrize(
    "spec", ["", ":", "broken", "gpt2", "owner/model", "json", "inner.none", "../mine.py", "a\0b"]
)
def test_nothing_is_offered_for_what_is_no_code_of_the_users(spec: str):
    assert suggestion_for(spec) is None


def test_an_installed_package_is_found():
    told = suggestion_for("dispfx.api.installation")
    assert told is not None and "dispfx.api.installation:" in told


@pytest.mark.parametrize("spec", ["mine.py", "mine:", "inner/deep/code"])
def test_a_path_or_half_a_name_is_refused_with_the_offer(spec: str):
    with pytest.raises(SourceError) as refusal:
        origin_of(spec)
    assert refusal.value.hint == suggestion_for(spec) and "name its function" in str(refusal.value.hint)


def test_a_name_that_the_hub_does_not_have_is_refused_with_the_offer():
    with pytest.raises(SourceError) as refusal:
        load_source("mine")
    assert refusal.value.hint == OFFER and refusal.value.exit_code == 2


def test_a_file_name_before_the_colon_is_refused_with_the_offer():
    with pytest.raises(SourceError) as refusal:
        load_source("quiet.py:build")
    assert str(refusal.value.hint).endswith("name its function, quiet:build")


@pytest.mark.parametrize("code", ["-" * 200_000 + "1", "lambda:" * 50_000 + "1", "a" + ".b" * 100_000])
def test_code_that_nests_too_deeply_to_be_read_is_no_offer(tmp_path: Path, code: str):
    """Python's parser says MemoryError or RecursionError of it."""
    (tmp_path / "deep.py").write_text(f"def build(): ...\nx = {code}\n")
    with pytest.raises(SourceError, match="MODEL is a file") as refusal:
        origin_of("deep.py")
    assert "Python code" not in str(refusal.value)


def test_where_the_current_folder_is_gone_installed_code_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert suggestion_for("mine") is None
    monkeypatch.syspath_prepend(tmp_path)
    told = suggestion_for("mine:bild")
    assert told is not None and told.endswith("name its function, mine:build or mine:large")
