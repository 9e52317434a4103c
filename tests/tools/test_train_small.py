"""The small decoder for trying recipes is trained from text alone, and can be pruned."""

import importlib
import sys
from pathlib import Path

import pytest

from dispfx.compiler.programs import capture
from dispfx.source import load_source

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
train_small = importlib.import_module("train_small")
sys.path.pop(0)

TEXT = "A small decoder reads this line again and again, and learns little. " * 60
SIZES = ["--vocabulary", "280", "--width", "32", "--layers", "1", "--batch-size", "1", "--steps", "2"]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_decoder_is_trained_and_written_with_its_tokenizer(tmp_path: Path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    out = tmp_path / "decoder"
    monkeypatch.setattr(sys, "argv", ["train_small.py", "--text", str(text), "--out", str(out), *SIZES])
    train_small.main()
    source = load_source(str(out))
    assert source.config is not None and source.config.use_parallel_residual and source.tokenizer is not None
    assert source.tokenizer.decode(source.tokenizer.encode("small decoder")) == "small decoder"
    assert [site.kind for site in capture(source.model).sites].count("read") == 2
