"""The quick run keeps tests of every room, and leaves out files that there are."""

import ast
from pathlib import Path

import pytest

from tests.quick_run import LEFT_OUT, is_left_out

TESTS = Path(__file__).parents[1]
# Clients run in environments of their own, which have to be installed first.
ROOMS = sorted({file.parent for file in TESTS.rglob("test_*.py")} - {TESTS / "clients"})
MARKS = ("slow", "long", "full")


def _marked(nodes: list[ast.expr]) -> bool:
    text = " ".join(ast.unparse(node) for node in nodes)
    return any(f"mark.{mark}" in text for mark in MARKS)


def quick_tests(file: Path) -> list[str]:
    """Return the tests of a file that the quick run takes whole."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_file = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    if is_left_out(file) or _marked(of_file):
        return []
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [test.name for test in tests if test.name.startswith("test_") and not _marked(test.decorator_list)]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(TESTS.parent)))
def test_every_room_has_tests_that_the_quick_run_takes(room: Path):
    assert [name for file in room.glob("test_*.py") for name in quick_tests(file)]


def test_what_is_left_out_is_there():
    there = {(file.parent.name, file.stem) for file in TESTS.rglob("test_*.py")}
    assert {(folder, f"test_{name}") for folder, names in LEFT_OUT.items() for name in names.split()} <= there


def test_every_test_of_a_file_that_is_left_out_has_its_mark(request: pytest.FixtureRequest):
    for item in request.session.items:
        assert is_left_out(item.path) == (item.get_closest_marker("full") is not None), item.nodeid
