"""The table of plans: a row is a name, a ratio and settings, and a bad row costs itself alone."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dispfx.errors import DispfxError
from dispfx.plan.plan import Plan

TOOL = Path(__file__).parents[2] / "tools" / "quality.py"


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module
    spec.loader.exec_module(module)
    return module


def test_a_row_names_a_recipe_or_a_method_and_changes_settings(quality):
    ratio, settings = quality._settings("a-model", "informed:0.4:lr=1e-2,steps=7,schedule=cosine", 3)
    assert (ratio, settings.lr, settings.steps, settings.schedule) == (0.4, 1e-2, 7, "cosine")
    assert (settings.seed, settings.start, settings.method) == (3, "sensitivity", "learned")
    assert quality._settings("a-model", "wanda:0.2", 0)[1].method == "wanda"
    assert quality._settings("a-model", "activation:0.2", 0)[1].method == "wanda", "by its other name"


@pytest.mark.parametrize("word", ["learned:0.3", "paper", "paper:half", "paper:0.3:colour=red", ""])
def test_a_word_that_is_no_row_is_refused(quality, word):
    with pytest.raises(DispfxError, match=r"row|setting"):
        quality._settings("a-model", word, 0)


def test_the_table_holds_every_row_and_the_message_of_a_failed_one(quality, tmp_path, capsys):
    rows = ["random:0.3", "random:1.5", "random:0.5:seed=5"]
    words = ["--out", str(tmp_path), "--context", "64", "--rows", *rows, "--device", "cpu"]
    quality._DEMO_CHARACTERS = 40_000
    assert quality.main(words) == 1
    found = json.loads((tmp_path / "quality.json").read_text())
    assert [row["row"] for row in found["rows"]] == rows
    dense, first, failed, last = found["facts"]["dense"], *found["rows"]
    assert dense["test"] < first["test"] < last["test"]
    assert abs(first["achieved"] - 0.3) < 0.001 and "BudgetError" in failed["error"]
    assert [row["seed"] for row in found["rows"]] == [0, 0, 5]
    plan = Plan.load(tmp_path / "plan2.safetensors")
    assert (plan.seed, plan.achieved) == (5, last["achieved"])
    table = (tmp_path / "quality.md").read_text()
    assert all(f"| {row} |" in table for row in rows)


def test_a_real_decoder_needs_text_to_learn_from_and_to_choose_on(quality, tmp_path):
    with pytest.raises(DispfxError, match="--data to learn from and --split"):
        quality.main(["--out", str(tmp_path), "--model", "demo", "--data", "a.txt"])
