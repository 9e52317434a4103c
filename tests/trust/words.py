"""Words of a command line, right and wrong, given to the command as the shell would."""

import json
import os
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from dispfx.errors import EXIT_INPUT_FAULT, DispfxError
from tests.command_line import NAMED, Option, arguments, options, run
from tests.trust.hostile import Kind
from tests.trust.mutations import ODD_TEXT

# They print tracebacks, import lm-eval (which takes longer than a case may), start processes, or write into
# the user's shell settings: that is what they are for.
_LEFT_OUT = {"debug", "tasks", "launch"}
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
    return st.sampled_from(sorted(NAMED)).flatmap(_of)


def _of(verb: str) -> SearchStrategy[list[str]]:
    taken = [option for option in options(NAMED[verb]) if option.name not in _LEFT_OUT]
    given = st.sampled_from(taken).flatmap(_option)
    places = st.lists(_VALUES, min_size=0, max_size=len(arguments(NAMED[verb])) + 1)
    # Options that must be there mostly are, so that the others are looked at.
    needed = [option for option in taken if option.required]
    first = st.tuples(*map(_option, needed)) if needed else st.just(())
    return st.tuples(places, first | st.just(()), st.lists(given, max_size=3)).map(
        lambda drawn: [verb, *drawn[0], *(word for option in (*drawn[1], *drawn[2]) for word in option)]
    )


def _option(option: Option) -> SearchStrategy[list[str]]:
    name = st.sampled_from(option.words)
    if option.is_flag:
        return name.map(lambda word: [word])
    return st.tuples(name, _CHOICES | _VALUES).map(list)


def _run(folder: Path) -> None:
    words = json.loads((folder / "words").read_bytes())
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = run(*words)
    finally:
        os.chdir(before)
    if result.exit_code == EXIT_INPUT_FAULT and "Traceback" not in result.output:
        raise DispfxError("refused")
    if result.exit_code != 0:
        raise RuntimeError(f"{words} ended with {result.exit_code}: {result.output[-300:]}")
    assert "Traceback" not in result.output, words
