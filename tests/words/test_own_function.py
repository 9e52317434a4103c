"""A user's own functions: found in their file, run once, known by what is in it, and named if they fail."""

import sys
from pathlib import Path
from types import ModuleType
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


@pytest.mark.parametrize(
    ("place", "imported"),
    [
        ("beside.py", "from beside import FACTOR"),
        ("beside.py", "import beside\nFACTOR = beside.FACTOR"),
        ("lib/__init__.py", "from lib import FACTOR"),
        ("lib/deep.py", "from lib.deep import FACTOR"),
        ("lib/deep.py", "from further import FACTOR"),
        ("lib/other.py", "from further import FACTOR"),
    ],
)
def test_a_function_is_known_by_what_its_file_imports_from_beside_it(place: str, imported: str):
    Path("lib").mkdir()
    for path in ("lib/__init__.py", "lib/deep.py", "beside.py"):
        Path(path).write_text("FACTOR = 2")
    if place == "lib/other.py":
        Path("lib/deep.py").write_text("from .other import FACTOR")
        Path(place).write_text("FACTOR = 2")
    Path("further.py").write_text("from lib.deep import FACTOR")
    Path("unread.py").write_text("FACTOR = 2")
    Path("mine.py").write_text(f"{imported}\nimport math\ndef score(x):\n    return FACTOR * x\n")
    before, found = identity_of("mine.py:score"), own_function("mine.py:score")
    Path("unread.py").write_text("FACTOR = 4")
    assert identity_of("mine.py:score") == before and found(3) == 6
    Path(place).write_text("FACTOR = 5")
    assert identity_of("mine.py:score") != before
    assert own_function("mine.py:score")(3) == 15 and found(3) == 6, "the same length, in the same second"


def test_an_import_inside_a_function_counts_and_one_of_dispfx_does_not():
    Path("mine.py").write_text("def score(x):\n    import beside\n    import dispfx\n    return x\n")
    Path("dispfx.py").write_text("raise SystemExit")
    before = identity_of("mine.py:score")
    Path("dispfx.py").write_text("")
    assert identity_of("mine.py:score") == before
    Path("beside.py").write_text("FACTOR = 3")
    assert identity_of("mine.py:score") != before


def test_two_folders_with_one_name_beside_do_not_share_it():
    for folder, factor in (("a", 2), ("b", 7)):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text(MINE)
        Path(folder, "beside.py").write_text(f"FACTOR = {factor}")
    found = [own_function(f"{folder}/mine.py:score") for folder in "ab"]
    assert [one(1) for one in found] == [2, 7]


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


def test_a_neighbour_is_not_a_module_of_its_name_from_elsewhere(monkeypatch: pytest.MonkeyPatch):
    other = ModuleType("rates")
    other.RATE = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rates", other)
    Path("rates.py").write_text("RATE = 2\n")
    Path("mine.py").write_text("from rates import RATE\n\ndef score():\n    return RATE\n")
    assert own_function("mine.py:score")() == 2
    assert sys.modules["rates"] is other
