"""No file that dispfx reads can run code: a pickle under any of their names is refused and does not run."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command_line import run as run_command
from tests.trust.runs import write_tokens

MODEL = "tests.api.plain:build_decoder"
SMALL = [
    "--ratio",
    "0.3",
    "--align",
    "4",
    "--steps",
    "4",
    "--batch-size",
    "2",
    "--seq-len",
    "16",
    "--save-every",
    "2",
]


class Poison:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(params=["pickle", "torch"])
def poison(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Path]:
    """Return what writes a poisoned file; the mark stays away as long as nobody unpickles it."""
    mark = tmp_path / "it ran"

    def write(path: Path) -> Path:
        path.unlink(missing_ok=True)
        if request.param == "torch":
            torch.save(Poison(mark), path)
        else:
            path.write_bytes(pickle.dumps(Poison(mark)))
        return mark

    return write


def run(*words: object) -> tuple[int, str]:
    result = run_command(*words)
    return result.exit_code, result.output + result.stderr


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("text") / "tokens.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    """An output folder as it should be."""
    out = tmp_path_factory.mktemp("whole") / "out"
    code, said = run("compile", MODEL, "--out", out, "--data", tokens, *SMALL)
    assert code == 0, said
    return out


def test_the_poison_works(poison: Callable[[Path], Path], tmp_path: Path) -> None:
    """Else the tests below could not fail."""
    mark = poison(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        if file.read(2) == b"PK":
            torch.load(tmp_path / "file", weights_only=False)
        else:
            file.seek(0)
            pickle.load(file)
    assert mark.is_dir()


@pytest.mark.parametrize("name", ["plan.safetensors", "program.pt2", "report.json"])
@pytest.mark.parametrize("verb", ["verify", "inspect", "export"])
def test_a_poisoned_folder_is_refused(
    verb: str, name: str, whole: Path, poison: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(whole, folder)
    mark = poison(folder / name)
    code, said = run(verb, folder, *(["--onnx"] if verb == "export" else []))
    assert code == 2, said
    assert not mark.exists() and "Traceback" not in said


@pytest.mark.parametrize(
    "name", ["text.txt", "text.jsonl", "text.jsonl.gz", "text.parquet", "tokens.safetensors"]
)
def test_a_poisoned_text_is_refused(name: str, poison: Callable[[Path], Path], tmp_path: Path) -> None:
    mark = poison(tmp_path / name)
    code, said = run("compile", MODEL, "--out", tmp_path / "out", "--data", tmp_path / name, *SMALL)
    assert code == 2, said
    assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["plan.safetensors", "plan.bin"])
def test_a_poisoned_plan_is_refused(
    name: str, tokens: Path, poison: Callable[[Path], Path], tmp_path: Path
) -> None:
    mark = poison(tmp_path / name)
    code, said = run("apply", MODEL, tmp_path / name, "--out", tmp_path / "out", "--data", tokens)
    assert code == 2, said
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_a_poisoned_table_of_costs_is_refused(
    tokens: Path, poison: Callable[[Path], Path], tmp_path: Path
) -> None:
    mark = poison(tmp_path / "costs.json")
    code, said = run(
        "compile",
        MODEL,
        "--out",
        tmp_path / "out",
        "--data",
        tokens,
        "--costs",
        tmp_path / "costs.json",
        *SMALL,
    )
    assert code == 2, said
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_a_poisoned_state_is_refused(
    tokens: Path, poison: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a saved state, one after another; but for the plan, which is written and not read."""
    out, words = tmp_path / "out", ["--data", tokens, *SMALL]
    with monkeypatch.context() as broken:
        broken.setattr("dispfx.api.compilation._finish", _fails)
        code, said = run("compile", MODEL, "--out", out, *words)
    files = sorted(path for path in (tmp_path / "out.state").iterdir() if path.is_file())
    saved = [path for path in files if path.name != "plan.safetensors"]
    assert code == 1 and saved and not out.exists(), said
    for path in saved:
        right = path.read_bytes()
        mark = poison(path)
        code, said = run("compile", MODEL, "--out", out, "--resume", *words)
        assert code == 2, (path.name, said)
        assert not mark.exists() and not out.exists()
        path.write_bytes(right)
    code, said = run("compile", MODEL, "--out", out, "--resume", *words)
    assert code == 0, said


def _fails(*_: object) -> None:
    raise RuntimeError("the run ends here")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_poisoned_weights_of_a_model_are_refused(
    name: str, tokens: Path, poison: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = '"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2'
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 61, ' + sizes + "}"
    )
    mark = poison(folder / name)
    code, said = run("compile", folder, "--out", tmp_path / "out", "--data", tokens, *SMALL)
    assert code == 2, said
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_a_poisoned_gguf_is_refused(tokens: Path, poison: Callable[[Path], Path], tmp_path: Path) -> None:
    mark = poison(tmp_path / "model.gguf")
    code, said = run("compile", tmp_path / "model.gguf", "--out", tmp_path / "out", "--data", tokens, *SMALL)
    assert code == 2, said
    assert not mark.exists() and not (tmp_path / "out").exists()
