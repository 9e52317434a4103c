"""The pages, their fenced blocks, and the commands in them, run in this process and cut short."""

import re
import runpy
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from typer.testing import CliRunner

from dispfx.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A checkpoint folder with its tokenizer, for where a page says MODEL.
CHECKPOINT = str(ROOT / "dispfx" / "demo" / "decoder")
# Learning and measuring are cut short: that the commands work is shown, not what they are worth.
_LEARNING = ["--steps", "2", "--batch-size", "2", "--samples", "1", "--seq-len", "32"]
_SHORTER = {
    "compile": [*_LEARNING, "--eval-windows", "1"],
    "learn": _LEARNING,
    "apply": ["--eval-windows", "1"],
    "eval": ["--eval-windows", "2"],
    "finetune": ["--steps", "2", "--batch-size", "2", "--seq-len", "32"],
    "bench": ["--batch", "1", "--prompt", "16", "--past", "16", "--mode", "eager"],
}

# Data on the hub is out of reach: files of the same names, which tests/local_tasks.py writes, stand in.
_TASKS = ["--task-folder", "tasks", "--limit", "2"]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each fenced block."""
    for found in FENCED.finditer(page.read_text(encoding="utf-8")):
        yield found.group(1), found.group(2)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; a remark stands behind three or more spaces."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.startswith("dispfx "):
            aligned = re.sub(r"^dispfx (\w+) {1,6}(?! )", r"dispfx \1 ", line)
            yield shlex.split(re.split(r" {3,}", aligned)[0])[1:]


def filled(words: list[str], places: Mapping[str, str]) -> list[str]:
    """Return a command with real names for its placeholders."""
    return [places.get(word, word) for word in words]


def run(words: list[str]) -> str:
    """Run a command in the current folder, with less to learn and to measure, and return what it prints."""
    shorter = _TASKS if "--tasks" in words else _SHORTER.get(words[0], [])
    done = CliRunner().invoke(app, [*words, *shorter])
    assert done.exit_code == 0, f"{' '.join(words)}\n{done.output[-3000:]}\n{done.exception!r}"
    return done.output


def printed(shown: str, output: str) -> bool:
    """Whether a page's lines were printed, where … stands for anything and a line may be cut in two."""
    found = " ".join(output.split())
    pieces = [" ".join(piece.split()) for line in shown.splitlines() for piece in line.split("…")]
    return all(piece in found for piece in pieces)


def run_file(name: str, text: str) -> None:
    """Write a page's file into the current folder and run it."""
    Path(name).write_text(text, encoding="utf-8")
    runpy.run_path(name)
