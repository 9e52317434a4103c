"""The commands and the Python of the README run, and so do the overview of commands and the page on ONNX."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dispfx.api
from dispfx.demo.grammar import generate_text
from dispfx.run.mask_learning import learn
from dispfx.source import load_source
from tests.docs.listed import LISTED
from tests.docs.pages import ROOT, blocks, commands, filled, run

README, COMMANDS, ONNX = ROOT / "README.md", ROOT / "docs" / "commands.md", ROOT / "docs" / "onnx.md"
PLACES = {"DIR": "made", "MODEL|DIR": "made", "PLAN": "plan.safetensors"}


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_and_the_python_of_the_readme_and_the_overview_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(generate_text(7, 40_000))
    shown = [words for _, text in blocks(README) for words in commands(text)]
    assert len(shown) == 3
    for words in shown:
        run(filled(words, {"MODEL": checkpoint, "DIR": "shown"}))
    ran = []
    for kind, text in blocks(COMMANDS):
        for words in commands(text) if not kind else ():
            if shlex.join(["dispfx", *words]) not in LISTED:
                run(command(words, checkpoint))
                ran.append(words[0])
    assert len(ran) >= 13 and Path("made/onnx/model.onnx").is_file() and Path("page.html").is_file()
    run_python(monkeypatch)


def command(words: list[str], checkpoint: str) -> list[str]:
    """Return a command of the overview with real names; what is written anew gets a name of its own."""
    places = PLACES | {"MODEL": checkpoint}
    if words[0] == "apply" and "plan.safetensors" in words:
        return ["apply", checkpoint, "plan.safetensors", "--out", "applied"]
    if words[0] == "compare" and "DIR" in words:
        return ["compare", "made", "applied", "--out", "page.html"]
    if "--dry-run" in words:
        return filled(words, places | {"DIR": "previewed"})
    return filled(words, places)


def run_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each block after the other; what the first one calls `model` and `tokens` is given."""
    monkeypatch.setattr(dispfx.api, "learn", partial(learn, steps=2, seq_len=32))
    known: dict[str, Any] = {"model": load_source("demo").model, "tokens": torch.randint(256, (2_000,))}
    for page in (README, ONNX):
        texts = [text.replace('"DIR', '"made') for kind, text in blocks(page) if kind == "python"]
        assert texts
        for text in texts:
            exec(compile(text, page.name, "exec"), known)
    assert known["smaller"](torch.tensor([[1, 2, 3]])) is not None
    assert torch.is_tensor(torch.tensor(known["logits"]))
