"""Every numbered rule of a module is cited by a test that shows it.

A module states its rules as a numbered list in its docstring, under a line with the word "rules" that ends in
a colon.  A test cites a rule in its docstring or in a comment: "rule 2" in the module's own tests
(`test_MODULE.py`), and "rule 2 of MODULE" anywhere else.
"""

import ast
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dispfx
import dispfx.passes

TESTS = Path(__file__).parents[1]
_HEADING = re.compile(r"^.*\brules\b[^\n]*:$", re.MULTILINE | re.IGNORECASE)
_RULE = re.compile(r"^(\d+)\. ", re.MULTILINE)
_CITATION = re.compile(r"\b[Rr]ules? (\d+(?:(?:, | and )\d+)*)(?:\s+of (\w+(?:\.\w+)*))?")


@dataclass(frozen=True)
class Citation:
    """A rule that a test names, as a module that the test means and a number."""

    test: str
    module: str
    rule: int


def numbered(docstring: str) -> list[int]:
    return [int(number) for number in _RULE.findall(docstring)]


def rules_of(docstring: str) -> list[int]:
    heading = _HEADING.search(docstring)
    return numbered(docstring[heading.end() :]) if heading else []


@cache
def docstrings() -> dict[str, str]:
    """Return the docstring of every module of dispfx, by the name that its imports end in."""
    found = {}
    for room, folders in (("", dispfx.__path__), ("passes.", dispfx.passes.__path__)):
        for folder in map(Path, folders):
            for path in sorted(folder.rglob("*.py")):
                name = room + ".".join(path.relative_to(folder).with_suffix("").parts)
                found[name] = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return found


@cache
def modules() -> dict[str, list[int]]:
    """Return the numbers of the rules of every module that states some."""
    found = {name: rules_of(docstring) for name, docstring in docstrings().items()}
    return {name: rules for name, rules in found.items() if rules}


@cache
def citations() -> tuple[Citation, ...]:
    return tuple(
        citation for path in sorted(TESTS.rglob("test_*.py")) for citation in _citations_in(path, modules())
    )


def _citations_in(path: Path, known: dict[str, list[int]]) -> Iterator[Citation]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        source = " ".join(line.strip(" #") for line in lines[first - 1 : node.end_lineno])
        for numbers, name in _CITATION.findall(source):
            module = _named(name, known) or _tested_by(path, known)
            for number in re.findall(r"\d+", numbers):
                yield Citation(f"{path.name}::{node.name}", module, int(number))


def _named(name: str, known: dict[str, list[int]]) -> str:
    found = [module for module in known if name and f".{module}".endswith(f".{name}")]
    assert len(found) < 2, f"{name} may be any of {found}"
    return found[0] if found else ""


def _tested_by(path: Path, known: dict[str, list[int]]) -> str:
    """Return the module whose own tests a file holds: the one in its room, if two have its name."""
    stem = path.stem.removeprefix("test_")
    found = [module for module in known if module.split(".")[-1] == stem]
    if len(found) > 1:
        found = [module for module in found if module.split(".")[-2:-1] == [path.parent.name]]
    return found[0] if len(found) == 1 else ""


def test_every_pass_that_numbers_its_rules_calls_them_rules():
    passes = {name: text for name, text in docstrings().items() if name.startswith("passes.")}
    assert {f"passes.{info.name}" for info in pkgutil.iter_modules(dispfx.passes.__path__)} <= set(passes)
    assert not [name for name, text in passes.items() if rules_of(text) != numbered(text)]
    assert sum(map(bool, map(rules_of, passes.values()))) >= 15


@pytest.mark.parametrize("module", modules())
def test_rules_are_numbered_from_one(module: str):
    assert modules()[module] == list(range(1, len(modules()[module]) + 1))


@pytest.mark.parametrize("module", modules())
def test_every_rule_is_cited_by_a_test(module: str):
    cited = {citation.rule for citation in citations() if citation.module == module}
    uncited = [rule for rule in modules()[module] if rule not in cited]
    assert not uncited, f"no test cites {', '.join(f'rule {rule}' for rule in uncited)} of {module}"


def test_every_citation_names_a_rule_that_there_is():
    assert not [found for found in citations() if found.rule not in modules().get(found.module, [])]
