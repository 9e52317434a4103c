"""The language model evaluation harness runs on a pruned folder, offline, with a task of one's own."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import dispfx
from dispfx.api import apply
from dispfx.demo import DECODER_FOLDER
from tests.local_tasks import write_tasks

lm_eval = pytest.importorskip("lm_eval")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_on_a_pruned_folder_through_hflm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
    dense = AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)
    program = dispfx.capture(dense)
    apply(dense, dispfx.Plan.random(program, 0.05, 0), out=tmp_path / "pruned", export="dense")
    manager = TaskManager(include_path=str(write_tasks(tmp_path)), include_defaults=False)

    tokenizer = AutoTokenizer.from_pretrained(DECODER_FOLDER)
    found = []
    for folder in (tmp_path / "pruned", tmp_path / "pruned" / "dense"):
        harness = HFLM(pretrained=str(folder), tokenizer=tokenizer, device="cpu", batch_size=2)
        # simple_evaluate does the same, and looks through the machine before and after.
        tasks = manager.load(["mine"])["tasks"]
        tasks["mine"].set_config(key="num_fewshot", value=0)
        results: Any = lm_eval.evaluate(harness, {"tasks": tasks}, bootstrap_iters=0)
        assert type(harness.model) is type(dense)
        found.append(results["results"]["mine"]["acc,none"])

    # The full-size checkpoint with zeros is read without dispfx and chooses the same.
    assert found[0] == found[1] and found[0] > 0
