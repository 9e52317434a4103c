"""The pages, their fenced blocks, and the commands in them, run and cut short."""

import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tests.command_line import run as run_command
from tests.processes import started

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "log").glob("*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Learning and measuring are cut short: that the commands work is shown, not what they are worth.
_LEARNING = ["--steps", "2", "--batch-size", "2", "--samples", "1", "--seq-len", "32"]
_SHORTER = {
    "compile": [*_LEARNING, "--eval-windows", "1"],
    "learn": _LEARNING,
    "apply": ["--eval-windows", "1"],
    "curve": ["--points", "2", "--eval-windows", "1"],
    "eval": ["--eval-windows", "2"],
    "sample": ["--tokens", "4000", "--seq-len", "32", "--opening", "4", "--batch-size", "16"],
    "recover": ["--steps", "2", "--batch-size", "2", "--seq-len", "32", "--eval-windows", "1"],
    "costs": ["--step", "prefill 1x16"],
    "bench": ["--batch", "1", "--prompt", "16", "--past", "16", "--mode", "eager"],
}

# Data on the hub is out of reach: files of the same names, which tests/local_tasks.py writes, stand in.
_TASKS = ["--task-folder", "tasks", "--limit", "2"]
# A line is a command where its first word, behind variables, is one of these programs.
_PROGRAM = r"dispfx|git|pip|python|accelerate|lm_eval|tensorboard|torchrun|(?:\./)?tools/\w[\w.]*"
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ +)*(?:{_PROGRAM})(?: .*)?")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    for found in FENCED.finditer(page.read_text(encoding="utf-8")):
        yield found.group(1), found.group(2)


def lines(text: str) -> Iterator[str]:
    """Yield each command of a block as one line; a remark stands behind three or more spaces, or a #."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if _COMMAND.fullmatch(line):
            aligned = re.sub(r"^(dispfx \w+) {1,6}(?! )", r"\1 ", line)
            yield re.split(r" {3,}| +# ", aligned)[0]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words behind `dispfx` of each command that begins with it."""
    for line in lines(text):
        if line.startswith("dispfx "):
            yield shlex.split(line)[1:]


def spans(page: Path) -> Iterator[str]:
    """Yield each command in the prose; a verb alone is none."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    for span in re.findall(r"`([^`]+)`", prose):
        line = " ".join(span.split())
        bare = re.fullmatch(r"(dispfx|accelerate) [a-z]+|\S+", line)
        if _COMMAND.fullmatch(line) and not bare:
            yield line


def filled(words: list[str], places: Mapping[str, str]) -> list[str]:
    """Return a command with real names for its placeholders."""
    return [places.get(word, word) for word in words]


def shortened(words: list[str]) -> list[str]:
    """Return a command with less to learn and to measure."""
    return [*words, *(_TASKS if "--tasks" in words else _SHORTER.get(words[0], []))]


def run(words: list[str]) -> str:
    """Run a command in the current folder, with less to learn and to measure, and return what it prints."""
    done = run_command(*shortened(words))
    assert done.exit_code == 0, f"{' '.join(words)}\n{done.output[-3000:]}"
    return done.output


def start(words: list[str]) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a program of the interpreter in the current folder while the block lasts."""
    return started(words, {**os.environ, "PYTHONPATH": str(ROOT)}, together=True)


def end(process: subprocess.Popen[str]) -> None:
    """Wait for a program that must end well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"{process.args}\n{output[-3000:]}"


def printed(shown: str, output: str) -> bool:
    """Whether a page's lines were printed, where … stands for anything and a line may be cut in two."""
    found = " ".join(output.split())
    pieces = [" ".join(piece.split()) for line in shown.splitlines() for piece in line.split("…")]
    return all(piece in found for piece in pieces)


def run_file(name: str, text: str) -> None:
    """Write a page's file into the current folder and run it."""
    Path(name).write_text(text, encoding="utf-8")
    runpy.run_path(name)
