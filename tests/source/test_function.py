"""package.module:function, from the current directory and wrong in every way."""

import sys
from pathlib import Path

import pytest
import torch

from dispfx.errors import SourceError
from dispfx.source import load_source

DECODER = """
import torch
from torch import nn

class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, ids):
        return self.table(ids)

class Lookahead(Bigram):
    def forward(self, ids):
        return self.table(ids).flip(1)

class Pooled(Bigram):
    def forward(self, ids):
        return self.table(ids).mean(1)

class Lost(Bigram):
    def forward(self, ids, mask):
        return self.table(ids)

class Lying(Bigram):
    def forward(self, ids):
        return {"scores": self.table(ids).sum(-1)}

def broken():
    raise ValueError("no weights here")

def nothing():
    return None

def both():
    return Bigram(), 3

def needy(size):
    return Bigram()

def talkative():
    print("building")
    return Bigram()

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"decoders_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(DECODER)
    monkeypatch.chdir(tmp_path)
    return name


def test_what_a_function_prints_stays_out_of_what_programs_read(
    module: str, capsys: pytest.CaptureFixture[str]
):
    load_source(f"{module}:talkative")
    assert capsys.readouterr() == ("", "building\n")


def test_a_package_that_the_code_of_a_function_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Its name begins as the module's own does.
    (tmp_path / "needs_more_things.py").write_text("import needs_more\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="No module named 'needs_more'") as error:
        load_source("needs_more_things:build")
    assert "needs_more_things.py:1" in str(error.value) and "install the package needs_more" in str(
        error.value
    )


def test_a_function_is_found_in_the_current_directory(module: str):
    before = list(sys.path)
    source = load_source(f"{module}:Bigram", dtype="bfloat16")

    assert source.origin == "function" and source.tokenizer is None and source.config is None
    assert not source.model.training
    assert source.model(torch.tensor([[1, 2]])).dtype == torch.bfloat16
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "has no absent"),
        ("number", "must be a function"),
        ("broken", "raised ValueError: no weights here"),
        ("nothing", "returned NoneType"),
        ("both", "returned a tuple of Bigram, int"),
        ("needy", "missing 1 required positional argument: 'size'"),
        ("Lookahead", "change with a later token"),
        ("Pooled", r"logits of shape .* were expected, .* \[\(1, 8\)\]"),
        ("Lying", r"the module returns tensors of \[\(1, 8\)\]"),
        ("Lost", "cannot run on token ids"),
    ],
)
def test_a_function_that_gives_no_decoder_is_refused(module: str, name: str, reason: str):
    with pytest.raises(SourceError, match=reason):
        load_source(f"{module}:{name}")


def test_a_function_that_raises_is_named_by_its_line(module: str):
    with pytest.raises(SourceError) as refusal:
        load_source(f"{module}:broken")
    line = DECODER.splitlines().index('    raise ValueError("no weights here")') + 1
    assert (refusal.value.where or "").endswith(f"{module}.py:{line}")


def test_a_missing_module_is_refused_with_the_folder_it_was_looked_for_in(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as refusal:
        load_source("absent_module:function")
    assert str(tmp_path) in (refusal.value.hint or "")


def test_a_module_that_fails_on_import_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "fails_on_import.py").write_text("import math\nmath.absent\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="AttributeError") as refusal:
        load_source("fails_on_import:function")
    assert (refusal.value.where or "").endswith("fails_on_import.py:2")


ENDS = """
import sys

def large():
    raise MemoryError("unable to allocate 9 TiB")

def small():
    sys.exit()
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("large", "memory ran out while MODEL's function ran: unable to allocate 9 TiB"),
        ("small", "MODEL's function raised SystemExit"),
    ],
)
def test_a_function_that_ends_the_process_or_its_memory_is_refused_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
):
    module = f"ends_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(ENDS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=told) as refusal:
        load_source(f"{module}:{name}")
    assert refusal.value.exit_code == 2 and f"{module}.py:" in str(refusal.value.where)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("x = " + "-" * 200_000 + "1", "memory ran out"),
    ],
)
def test_a_module_that_ends_the_process_or_its_memory_on_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, told: str
):
    module = f"imported_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=told):
        load_source(f"{module}:build")


def test_where_the_current_folder_is_gone_a_function_is_looked_for_among_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    before = list(sys.path)
    with pytest.raises(SourceError, match="the current folder, which was removed, and among the installed"):
        load_source("absent_everywhere:build")
    assert sys.path == before
    name = f"elsewhere_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(DECODER)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load_source(f"{name}:Bigram").model).__name__ == "Bigram"
