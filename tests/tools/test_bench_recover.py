"""The table of recoveries: each row is measured on two texts, written at once, and not trained twice."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file

from dispfx.api import agree
from tests.api.conftest import MODEL
from tests.api.conftest import random_tokens as tokens_of

TOOL = Path(__file__).parents[2] / "tools" / "bench_recover.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_recover", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_recover"] = module
    sys.path.insert(0, str(TOOL.parent))
    spec.loader.exec_module(module)
    sys.path.pop(0)
    return module


@pytest.mark.slow
def test_every_row_is_there_with_both_texts_and_a_second_run_trains_nothing(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = []
    for seed, name in enumerate(("data", "test", "second")):
        save_file({"tokens": tokens_of(seed=seed)}, tmp_path / f"{name}.safetensors")
        texts += [f"--{name}", str(tmp_path / f"{name}.safetensors")]
    out = tmp_path / "out"
    words = [
        "--model", MODEL, *texts, "--out", str(out), "--ratios", "0.3", "--learn-steps", "2", "--steps", "12",
        "--seq-len", "16", "--batch-size", "2", "--windows", "4", "--context", "16", "--lr", "1e-3",
    ]  # fmt: skip
    assert bench.main(words) == 0
    found = json.loads((out / "recover.json").read_text())["rows"]
    assert [row["recover"] for row in found] == ["dense", "none", "scales", "weights", "control"]
    dense, none, scales, weights, control = found
    assert none["parameters"] == scales["parameters"] == weights["parameters"]
    assert weights["test"]["kl"] < none["test"]["kl"] and weights["tokens"] == 12 * 2 * 16
    # The tuned decoder fits the text better, and is no longer the same.
    assert control["test"]["kl"] > 0.0 and control["tokens"] == 12 * 2 * 16
    assert dense["second"]["kl"] == 0.0 != none["second"]["kl"]
    by_hand = agree(
        out / "weights-0.3",
        dense=MODEL,
        eval_data=tmp_path / "second.safetensors",
        eval_windows=4,
        context=16,
    )
    assert weights["second"]["kl"] == pytest.approx(by_hand.kl_nats)
    table = (out / "recover.md").read_text().splitlines()
    assert len(table) == 7 and table[3].startswith("| 30% | none |")

    monkeypatch.setattr(bench.api, "recover", lambda *args, **further: pytest.fail("it is there already"))
    assert bench.main(words) == 0
    assert json.loads((out / "recover.json").read_text())["rows"][3]["test"] == weights["test"]


def test_a_row_that_fails_says_why_and_costs_itself_alone(bench: ModuleType):
    row = {"removed": 0.3, "recover": "scales", "error": "DataError: no text\n  try: another"}
    assert bench._line(row) == "| 30% | scales | DataError: no text |"
