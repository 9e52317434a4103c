"""The paper's five tasks, and one more, on local files: lm-eval asks the demo's grammar, offline."""

import json
from pathlib import Path

from dispfx.quality.task_harness import PAPER_METRICS

WORDS = ("abc", "xyz", "kmt", "dfg", "pqr", "stu")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "copy {{{{word}}}} ="
doc_to_choice: [" {{{{word}}}}", " {{{{other}}}}"]
doc_to_target: 0
metric_list:
{metrics}
metadata:
  version: 2.5
"""


def write_tasks(folder: Path) -> Path:
    """Write task files and their six questions, and return the folder of the task files."""
    data, tasks = folder / "rows.jsonl", folder / "tasks"
    data.write_text("".join(json.dumps({"word": word, "other": word[::-1]}) + "\n" for word in WORDS))
    tasks.mkdir()
    for name in (*PAPER_METRICS, "mine"):
        known = ["acc"] if name in ("winogrande", "mine") else ["acc", "acc_norm"]
        metrics = "\n".join(f"  - metric: {metric}" for metric in known)
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data, metrics=metrics))
    return tasks
