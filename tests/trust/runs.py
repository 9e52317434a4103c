"""Runs of the command line in processes that were forked after everything was imported.

A run of its own would spend ten seconds on imports and one on what is looked at here; so does the first run
of a program that has not called `warm_up`.
"""

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from dispfx.cli import main
from tests.plain_decoders import VOCABULARY

SEED = 7
STEPS = 40
KILLED = -signal.SIGKILL
# A run takes two to four; one that hangs is ended by SIGALRM, and told by its exit code.
_LONGEST_SECONDS = 300


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Args:
        code: its exit code, or minus the signal that ended it.
        said: what it wrote to stderr.
    """

    code: int
    said: str


def write_tokens(path: Path) -> Path:
    """Write a text of random tokens, the same every time, and return where."""
    numbers = torch.Generator().manual_seed(0)
    save_file({"tokens": torch.randint(0, VOCABULARY, (1_200,), generator=numbers)}, path)
    return path


def command(tokens: Path, out: Path, *more: str) -> list[str]:
    """Return a small `compile` of all kinds of site that saves its state at every second step and exports."""
    words = ["compile", "tests.api.plain:build_decoder", "--out", str(out), "--data", str(tokens)]
    words += ["--ratio", "0.3", "--align", "4", "--seed", str(SEED), "--steps", str(STEPS)]
    words += ["--sites", "heads"]
    words += ["--batch-size", "2", "--seq-len", "16", "--save-every", "2", "--device", "cpu", "--quiet"]
    return [*words, *more]


def warm_up(folder: Path) -> None:
    """Import what a command with every stage needs; it runs in a process of its own, which says what that is.

    Here it would start the threads of autograd, without which torch refuses to go on behind a fork where it
    was built for a GPU.

    Raises:
        RuntimeError: if the command fails.
    """
    tokens, modules = write_tokens(folder / "warm-up.safetensors"), folder / "modules"
    words = command(tokens, folder / "warm-up", "--export", "onnx", "--steps", "2")
    ended = run(words, behind=lambda: modules.write_text("\n".join(sys.modules), encoding="utf-8"))
    if ended.code != 0:
        raise RuntimeError(f"the run ended with {ended.code}: {ended.said}")
    for name in modules.read_text(encoding="utf-8").splitlines():
        with suppress(ImportError):  # a module that another one made up
            importlib.import_module(name)


def run(
    words: Sequence[str],
    *,
    before: Callable[[], object] = lambda: None,
    behind: Callable[[], object] = lambda: None,
) -> Ended:
    """Run `dispfx words`.

    Args:
        before, behind: done in the new process before the command, and when it has succeeded.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_the_command(words, writer, before, behind)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return Ended(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said)


def _be_the_command(
    words: Sequence[str], writer: int, before: Callable[[], object], behind: Callable[[], object]
) -> None:
    code = 70
    try:
        # Replaces the threads that the fork has lost, before two threads try to do so at once.
        torch.set_num_threads(1)
        signal.alarm(_LONGEST_SECONDS)
        before()
        errors = io.TextIOWrapper(os.fdopen(writer, "wb", 0), write_through=True)
        with redirect_stderr(errors), redirect_stdout(io.StringIO()):
            sys.argv = ["dispfx", *words]
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 0:
            behind()
    finally:
        os._exit(code)
