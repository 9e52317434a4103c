"""Tasks of lm-eval on the demo, offline, with task files of one's own."""

import sys
from pathlib import Path

import pytest

import dispfx
from dispfx.api import apply, score_tasks
from dispfx.errors import DataError
from dispfx.quality.task_harness import PAPER_METRICS
from tests.api.conftest import MODEL, Watcher
from tests.local_tasks import write_tasks


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the paper's five tasks, each on six local questions."""
    pytest.importorskip("lm_eval")
    return write_tasks(tmp_path)


def test_the_papers_five_tasks_by_their_own_metrics_and_their_average(tasks: Path):
    watcher = Watcher()
    found = score_tasks(
        "demo", tasks=list(PAPER_METRICS), task_folder=tasks, batch_size=3, limit=4, observer=watcher
    )
    assert {score.task: score.metric for score in found.scores} == dict(PAPER_METRICS)
    assert found.average == pytest.approx(sum(score.value for score in found.scores) / 5)
    first = found.scores[0]
    assert (first.samples, first.of, first.shots, first.version) == (4, 6, 0, "2.5")
    assert set(first.metrics) == {"acc", "acc_norm"} and first.error is not None
    assert (found.context, found.batch_size, found.limit) == (256, 3, 4)
    assert "lm-eval" in found.versions
    assert len(watcher.notes) == 5 and watcher.notes[0].startswith("piqa: acc_norm ")


def test_examples_help_the_demo_to_copy(tasks: Path):
    alone, helped = (
        score_tasks("demo", tasks=["mine"], task_folder=tasks, shots=shots).scores[0] for shots in (0, 2)
    )
    assert (alone.shots, helped.shots) == (0, 2)
    assert helped.value == 1.0, "the demo copies words once it sees how lines look"


def test_a_pruned_folder_scores_what_the_dense_decoder_with_zeros_scores(tasks: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from dispfx.demo import DECODER_FOLDER

    dense = AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)
    plan = dispfx.Plan.random(dispfx.capture(dense), 0.05, 0)
    apply(dense, plan, out=tmp_path / "pruned", export="dense")
    scores = [
        score_tasks(
            str(folder), tasks=["mine"], task_folder=tasks, shots=2, tokenizer=str(DECODER_FOLDER)
        ).scores[0].metrics
        for folder in (_with_tokenizer(tmp_path / "pruned"), tmp_path / "pruned" / "dense")
    ]  # fmt: skip
    assert scores[0] == scores[1] and scores[0]["acc"] > 0


def _with_tokenizer(folder: Path) -> Path:
    from transformers import AutoTokenizer

    from dispfx.demo import DECODER_FOLDER

    AutoTokenizer.from_pretrained(DECODER_FOLDER).save_pretrained(folder)
    return folder


def test_an_unknown_task_is_refused_with_its_likeliest_name(tasks: Path):
    with pytest.raises(DataError, match="no task 'mein'") as caught:
        score_tasks("demo", tasks=["mein"], task_folder=tasks)
    assert "mine" in str(caught.value.hint)


def test_data_that_cannot_be_reached_is_the_inputs_fault_and_says_what_to_do(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tasks / "mine.yaml"
    file.write_text(file.read_text().replace("dataset_path: json", "dataset_path: nobody/nothing"))
    with pytest.raises(DataError, match="the task mine gives no questions") as caught:
        score_tasks("demo", tasks=["mine"], task_folder=tasks)
    assert "`task_folder`" in str(caught.value.hint)


def test_a_template_without_its_column_is_the_inputs_fault(tasks: Path):
    file = tasks / "mine.yaml"
    file.write_text(file.read_text().replace("copy {{word}}", "copy {{verb}}"))
    with pytest.raises(DataError, match="'verb' is undefined") as caught:
        score_tasks("demo", tasks=["mine"], task_folder=tasks)
    assert "templates" in str(caught.value.hint)


def test_a_module_of_ones_own_has_no_tasks(tasks: Path):
    with pytest.raises(DataError, match="a decoder that transformers knows"):
        score_tasks(MODEL, tasks=["mine"], task_folder=tasks)


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(DataError, match="which cannot be imported") as caught:
        score_tasks("demo", tasks=["piqa"])
    assert caught.value.hint == "pip install 'dispfx[lm-eval]'"


def test_a_question_begins_as_the_tokenizer_begins_a_text_unless_told_otherwise(tasks: Path, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    asked = []
    plain = HFLM.__init__

    def spied(self, *arguments, **options):
        asked.append(options["add_bos_token"])
        plain(self, *arguments, **options)

    monkeypatch.setattr(HFLM, "__init__", spied)
    score_tasks("demo", tasks=["mine"], task_folder=tasks, limit=1)
    score_tasks("demo", tasks=["mine"], task_folder=tasks, limit=1, bos="off")
    assert asked == [None, False]
    with pytest.raises(DataError, match="this tokenizer adds none"):
        score_tasks("demo", tasks=["mine"], task_folder=tasks, limit=1, bos="on")
