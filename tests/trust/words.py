"""Words of a command line, right and wrong, given to the command as the shell would."""

import json
import os
from pathlib import Path
from typing import Any

import typer
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from typer.testing import CliRunner

from dispfx.cli.app import app
from dispfx.errors import EXIT_INPUT_FAULT, DispfxError
from tests.trust.hostile import Kind
from tests.trust.mutations import ODD_TEXT

# They print tracebacks, import lm-eval (which takes longer than a case may), start processes, or write into
# the user's shell settings: that is what they are for.
_LEFT_OUT = {"debug", "tasks", "launch", "install_completion", "show_completion"}
_NAMES = (
    "nothing.at:all", "json:dumps", "os:getcwd", "some/model", "folder", "config.json", "model.gguf",
    "plan.safetensors", "text.txt", "report.json", "datasets:none", "new", "new.html", "demo.txt",
)  # fmt: skip
_CHOICES = st.sampled_from(
    ("onnx", "none", "blocks", "before-norm", "paper", "linear", "bfloat16", "auto", "2")
)
_VALUES = st.one_of(
    st.sampled_from(_NAMES),
    st.sampled_from(ODD_TEXT).map(lambda text: text.replace("\x00", "").replace("\ud800", "�")),
    st.sampled_from(
        ("0", "1", "-1", "0.3", "1.0", "nan", "inf", "1e400", "9" * 400, "0x10", "cpu", "cuda:99")
    ),
    st.text(max_size=8).map(lambda text: text.replace("\x00", "").encode(errors="replace").decode()),
)


def words_kind(made: Path) -> Kind:
    """Return command lines; their folder holds an output folder's plan and some files that are none."""
    plan = (made / "pruned" / "plan.safetensors").read_bytes()
    whole = {
        "plan.safetensors": plan,
        "text.txt": b"some words\n",
        "config.json": b"{}",
        "model.gguf": b"GGUF",
    }
    valid = {"words": json.dumps(["inspect", "plan.safetensors"]).encode()}
    cases = _lines().map(lambda words: {"words": json.dumps(words).encode()})
    return Kind("words", cases, _run, {**whole, "report.json": b"[]"}, valid)


def _lines() -> SearchStrategy[list[str]]:
    command: Any = typer.main.get_command(app)
    return st.sampled_from(sorted(command.commands)).flatmap(lambda verb: _of(verb, command.commands[verb]))


def _of(verb: str, command: Any) -> SearchStrategy[list[str]]:
    arguments = sum(parameter.param_type_name == "argument" for parameter in command.params)
    options = [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name not in _LEFT_OUT
    ]
    given = st.sampled_from(options).flatmap(_option)
    places = st.lists(_VALUES, min_size=0, max_size=arguments + 1)
    # Options that must be there mostly are, so that the others are looked at.
    needed = [option for option in options if option.required]
    first = st.tuples(*map(_option, needed)) if needed else st.just(())
    return st.tuples(places, first | st.just(()), st.lists(given, max_size=3)).map(
        lambda drawn: [verb, *drawn[0], *(word for option in (*drawn[1], *drawn[2]) for word in option)]
    )


def _option(option: Any) -> SearchStrategy[list[str]]:
    name = st.sampled_from([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return name.map(lambda word: [word])
    return st.tuples(name, _CHOICES | _VALUES).map(list)


def _run(folder: Path) -> None:
    words = json.loads((folder / "words").read_bytes())
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, words)
    finally:
        os.chdir(before)
    if result.exit_code == EXIT_INPUT_FAULT and "Traceback" not in result.output:
        raise DispfxError("refused")
    if result.exit_code != 0:
        raise RuntimeError(f"{words} ended with {result.exit_code}: {result.output[-300:]}")
    assert "Traceback" not in result.output, words
