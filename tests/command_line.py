"""The command line in this process: what it takes, what it prints and how it exits."""

import inspect
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from dispfx.cli import main
from dispfx.cli.app import VERBS, make_app
from dispfx.cli.verb import Verb

NAMED = {verb.named: verb for verb in VERBS}


@dataclass(frozen=True)
class Result:
    """What a command did; `output` has both streams in the order in which they were written."""

    exit_code: int
    stdout: str
    stderr: str
    output: str


class _Both(io.StringIO):
    """A stream that also writes to another."""

    def __init__(self, both: io.StringIO):
        super().__init__()
        self._both = both

    def write(self, text: str) -> int:
        self._both.write(text)
        return super().write(text)


def run(*words: Any) -> Result:
    """Run `dispfx` with these words; an error that is no message ends in a traceback and exit code 1."""
    both = io.StringIO()
    out, err = _Both(both), _Both(both)
    exit_code = 0
    with _arguments([str(word) for word in words]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
            exit_code = 1
    return Result(exit_code, out.getvalue(), err.getvalue(), both.getvalue())


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["dispfx", *words]
    try:
        yield
    finally:
        sys.argv = before


@dataclass(frozen=True)
class Option:
    """One option of a verb.

    Args:
        name: of the setting.
        words: how it is written, `--no-…` among them.
        is_flag: whether no value follows.
        required: whether the verb needs it.
    """

    name: str
    words: tuple[str, ...]
    is_flag: bool
    required: bool


def options(verb: Verb) -> list[Option]:
    """Return the options of a verb."""
    return [
        Option(one.name, _words(one), _value_type(one) is bool, one.default is one.empty)
        for one in verb.signature().parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]


def arguments(verb: Verb) -> list[str]:
    """Return the names of the settings that a verb takes without an option."""
    return [one.name for one in verb.signature().parameters.values() if one.kind is one.POSITIONAL_ONLY]


def check(words: Sequence[str]) -> None:
    """Pass if a command line has a verb and arguments that exist; nothing is run.

    Raises:
        CycloptsError: saying what is wrong.
    """
    assert words[0] in NAMED, words
    make_app().parse_args(list(words), exit_on_error=False, print_error=False)


def _words(parameter: inspect.Parameter) -> tuple[str, ...]:
    facts = parameter.annotation.__metadata__[0]
    off = "--no-" + facts.name[0].removeprefix("--")
    return (*facts.name, *([off] if facts.negative is None else []))


def _value_type(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__origin__
