"""Every verb's help ends in examples, and they are command lines that hold."""

import shlex

import pytest

from dispfx.cli.examples import EXAMPLES
from tests.command_line import NAMED, check

ALL = [(verb, example) for verb, examples in EXAMPLES.items() for example in examples]


def test_every_verb_has_examples():
    assert set(EXAMPLES) == set(NAMED)
    assert all(EXAMPLES.values())


@pytest.mark.parametrize(("verb", "example"), ALL, ids=[example for _, example in ALL])
def test_an_example_parses_as_it_stands(verb: str, example: str):
    program, named, *words = shlex.split(example)
    assert (program, named) == ("dispfx", verb)
    check([named, *words])


@pytest.mark.parametrize("verb", EXAMPLES)
def test_help_shows_them_whole(dispfx, monkeypatch: pytest.MonkeyPatch, verb: str):
    monkeypatch.setenv("COLUMNS", "200")
    shown = dispfx(verb, "--help").stdout
    assert "Examples:" in shown
    lines = [line.strip() for line in shown.splitlines()]
    assert all(example in lines for example in EXAMPLES[verb])


@pytest.mark.parametrize("verb", ["compile", "eval"])
def test_help_fits_a_narrow_terminal(dispfx, monkeypatch: pytest.MonkeyPatch, verb: str):
    monkeypatch.setenv("COLUMNS", "40")
    result = dispfx(verb, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 40
