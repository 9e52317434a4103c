"""The language model evaluation harness runs on a pruned folder, offline, with a task of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import dispfx
from dispfx.api import apply
from dispfx.demo import DECODER_FOLDER

lm_eval = pytest.importorskip("lm_eval")

TASK = """
task: copied_word
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "copy {{{{word}}}} ="
doc_to_choice: [" {{{{word}}}}", " {{{{other}}}}"]
doc_to_target: 0
metric_list:
  - metric: acc
"""


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
    rows = [{"word": word, "other": word[::-1]} for word in ("abc", "xyz", "kmt", "dfg")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "copied_word.yaml").write_text(TASK.format(data=data))

    tokenizer = AutoTokenizer.from_pretrained(DECODER_FOLDER)
    found = []
    for folder in (tmp_path / "pruned", tmp_path / "pruned" / "dense"):
        harness = HFLM(pretrained=str(folder), tokenizer=tokenizer, device="cpu", batch_size=2)
        results: Any = lm_eval.simple_evaluate(
            model=harness,
            tasks=["copied_word"],
            task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
            bootstrap_iters=0,
        )
        assert type(harness.model) is type(dense)
        found.append(results["results"]["copied_word"]["acc,none"])

    # The full-size checkpoint with zeros is read without dispfx and chooses the same.
    assert found[0] == found[1] and found[0] > 0
