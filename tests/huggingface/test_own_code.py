"""A checkpoint with code of its own: every verb works with the flag, and none runs the code without it."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.hub import HF_MODULES_CACHE

import dispfx
from dispfx.errors import DispfxError, OutputError
from dispfx.report import load_report
from tests import own_code
from tests.command_line import run as run_command
from tests.own_code import KINDS, write_own_code

FLAG = "--trust-remote-code"
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
SMALL = ["--ratio", "0.3", "--align", "4", "--steps", "2", "--batch-size", "2", "--seq-len", "16"]


@dataclass(frozen=True)
class Case:
    """A checkpoint, its pruned folder, the text of both, and the mark that their code leaves."""

    kind: str
    dense: Path
    pruned: Path
    text: Path
    mark: Path


def run(*words: object) -> tuple[int, str]:
    result = run_command(*words)
    return result.exit_code, result.output + result.stderr


def made(kind: str, folder: Path) -> Case:
    text, mark = folder / "text.txt", folder / "it-ran"
    text.write_text(TEXT)
    dense = write_own_code(kind, folder / "dense", mark)
    code, said = run("compile", dense, FLAG, "--data", text, *SMALL, "--out", folder / "DIR")
    assert code == 0, said
    return Case(kind, dense, folder / "DIR", text, mark)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("cached", tmp_path_factory.mktemp("one"))


def forget_code() -> None:
    """Let code run again that has run in this process."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
        del sys.modules[name]


def test_the_code_travels_whole_and_the_folder_verifies_elsewhere(case: Case, tmp_path: Path):
    own = {file.name: file.read_bytes() for file in case.dense.glob("*.py")}
    assert {file.name: file.read_bytes() for file in case.pruned.glob("*.py")} == own
    assert own.keys() <= load_report(case.pruned / "report.json").files.keys()

    moved = shutil.copytree(case.pruned, tmp_path / "moved elsewhere")
    code, said = run("verify", moved, FLAG)
    assert code == 0 and "✗" not in said, said
    with (moved / min(own)).open("a") as file:
        file.write("# changed")
    code, said = run("verify", moved, FLAG)
    assert code == 1 and min(own) in said, said


def test_transformers_and_dispfx_load_the_same_decoder_as_its_own_class(case: Case):
    own: Any = dispfx.load(case.pruned, trust_remote_code=True)
    theirs = AutoModelForCausalLM.from_pretrained(case.pruned, trust_remote_code=True)

    ids = torch.arange(24).reshape(2, 12)
    assert torch.equal(own(ids).logits, theirs(ids).logits)
    expected = "LlamaForCausalLM" if case.kind == "config" else "OwnForCausalLM"
    assert type(own).__name__ == type(theirs).__name__ == expected
    card = (case.pruned / "README.md").read_text()
    assert "trust_remote_code=True)" in card and f"dispfx verify DIR {FLAG}" in card


def test_without_the_flag_nothing_of_a_folder_runs(case: Case):
    case.mark.unlink(missing_ok=True)
    forget_code()

    for words in (["verify", case.pruned], ["inspect", case.dense]):
        code, said = run(*words)
        assert code == 2 and FLAG in said, said
    with pytest.raises(DispfxError, match="code that comes with the folder"):
        dispfx.load(case.pruned)
    # transformers has a class of its own for one of them, which computes something else.
    with pytest.raises((ValueError, OutputError), match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(case.pruned, trust_remote_code=False)
    assert not case.mark.exists()


def test_nothing_of_a_private_folder_stays_in_the_cache_of_transformers(cached: Case):
    names = [path.name for path in Path(HF_MODULES_CACHE, "transformers_modules").iterdir()]
    assert not [name for name in names if "partial" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "DIR", "--prompt", "the "],
        ["eval", "DIR", "--eval-data", "TEXT"],
        ["export", "DIR", "--pt2", "--onnx"],
        ["apply", "DENSE", "DIR/plan.safetensors", "--out", "NEW", "--export", "dense"],
        ["bench", "DIR", "--batch", "1", "--prompt", "8", "--past", "8", "--mode", "eager"],
        [
            "recover",
            "DIR",
            "--dense",
            "DENSE",
            "--data",
            "TEXT",
            "--steps",
            "2",
            "--seq-len",
            "16",
            "--out",
            "NEW",
        ],
    ],
    ids=lambda words: words[0],
)
def test_every_verb_works_with_the_flag_and_without_it_runs_nothing(
    cached: Case, words: list[str], tmp_path: Path
):
    pruned = shutil.copytree(cached.pruned, tmp_path / "DIR")
    named = {"DIR": pruned, "TEXT": cached.text, "DENSE": cached.dense, "NEW": tmp_path / "NEW"}
    given = [str(named.get(word, word)).replace("DIR/", f"{pruned}/") for word in words]
    cached.mark.unlink(missing_ok=True)
    forget_code()

    code, said = run(*given)
    assert code == 2 and FLAG in said and not cached.mark.exists(), said
    assert not (tmp_path / "NEW").exists()

    code, said = run(*given, FLAG)
    assert code == 0, said
    assert cached.mark.exists()
    if (tmp_path / "NEW").exists():
        code, said = run("verify", tmp_path / "NEW", FLAG)
        assert code == 0 and "✗" not in said, said


def test_a_weight_that_is_scaled_by_its_own_mean_is_read_back_with_the_dense_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = own_code._CODE["plain"]
    plain = "self.down(self.up(self.norm(x)).relu())"
    scaled = (
        "nn.functional.linear(self.up(self.norm(x)).relu(), "
        "self.down.weight.sign() * self.down.weight.abs().mean(), self.down.bias)"
    )
    assert plain in code["parts_own"]
    monkeypatch.setitem(code, "parts_own", code["parts_own"].replace(plain, scaled))
    dense = write_own_code("plain", tmp_path / "scaled", tmp_path / "it-ran")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["--data", tmp_path / "text.txt", *SMALL, "--method", "random", "--out", tmp_path / "DIR"]
    status, said = run("compile", dense, FLAG, *words)
    assert status == 0 and "dispfx.load opens it" in said, said
    status, said = run("verify", tmp_path / "DIR", FLAG)
    assert status == 0 and "✗" not in said, said
