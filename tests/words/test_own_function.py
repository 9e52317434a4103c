"""A user's own functions: found in their file, run once, known by what is in it, and named if they fail."""

from pathlib import Path
from typing import Any

import pytest

from dispfx.errors import DispfxError, SourceError
from dispfx.words.own_function import identity_of, names_function, own_function, own_or_choice

MINE = """
from beside import FACTOR
calls = []
def score(x):
    calls.append(x)
    return FACTOR * x
def fails(x):
    return x / 0
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("beside.py").write_text("FACTOR = 2")


def test_a_function_is_called_and_its_file_may_import_what_stands_beside_it():
    found = own_function("mine.py:score")
    assert found(3) == 6 and found.name == "mine.py:score"
    own_function("mine.py:score")(4)
    assert found.function.__globals__["calls"] == [3, 4], "the file ran once"


def test_a_function_is_known_by_its_name_and_what_is_in_its_file():
    before = identity_of("mine.py:score")
    assert str(before).startswith("mine.py:score (") and identity_of("mine.py:score") == before
    Path("mine.py").write_text(MINE.replace("FACTOR * x", "FACTOR + x"))
    assert identity_of("mine.py:score") != before and own_function("mine.py:score")(3) == 5
    assert identity_of("wanda") == "wanda"
    assert identity_of(_folder) != identity_of(test_a_function_is_known_by_its_name_and_what_is_in_its_file)


def test_only_a_function_of_a_file_or_of_python_is_taken_for_one():
    assert (
        names_function("mine.py:score")
        and names_function("/some where/mine.py:score")
        and names_function(len)
    )
    for value in ("wanda", "mine:score", "mine.py", "mine.py:", "mine.py:a.b", "mine.txt:score", None, 3):
        assert not names_function(value)
    assert own_or_choice({"one": 1}, "one", "method") == 1
    with pytest.raises(DispfxError, match="method must be one, and 'two' was given"):
        own_or_choice({"one": 1}, "two", "method")


@pytest.mark.parametrize(
    ("spec", "content", "message"),
    [
        ("none.py:score", None, "the file of none.py:score cannot be read: No such file"),
        ("a.py:scroe", "def score(): ...", r"a.py has no function scroe\n.*\n  try:   did you mean score"),
        ("b.py:score", "score = 3", r"its functions are none"),
        ("c.py:score", "def score(:", r"c.py cannot be run: SyntaxError.*\n  where: .*c.py:1"),
        (
            "d.py:score",
            "\nimport no_such_thing",
            r"d.py cannot be run: ModuleNotFoundError.*\n  where: .*d.py:2",
        ),
        ("e.py:score", "exit()", "e.py cannot be run: SystemExit"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_of(spec: str, content: Any, message: str):
    if content is not None:
        Path(spec.partition(":")[0]).write_text(content)
    with pytest.raises(SourceError, match=message):
        own_function(spec)


def test_a_function_that_raises_is_told_of_with_its_line():
    with pytest.raises(SourceError, match=r"mine\.py:fails raised ZeroDivisionError") as error:
        own_function("mine.py:fails")(1)
    assert str(error.value.where).endswith("mine.py:8")
