"""Scores in tasks, as rows and notes."""

from dispfx.quality.task_harness import PAPER_METRICS, TaskScore, TaskScores
from dispfx.report.task_rows import task_line, task_notes, task_rows, tasks_plain


def score(task: str = "piqa", value: float = 0.61, samples: int = 100, metric: str = "acc_norm") -> TaskScore:
    metrics = {"acc": 0.6, metric: value}
    return TaskScore(task, metric, value, 0.01, metrics, samples, 100, 0, "1.0")


def found(more: float = 0.0, *scores: TaskScore) -> TaskScores:
    return TaskScores(scores or (score(value=0.61 + more),), 64, 4, None, {"lm-eval": "0.4.13"})


def five(more: float = 0.0) -> TaskScores:
    values = zip(PAPER_METRICS.items(), (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)
    return found(0, *(score(task, value + more, metric=metric) for (task, metric), value in values))


def test_one_decoder_has_one_column_and_its_average():
    rows = task_rows(five())
    assert rows[0] == ("piqa", "acc_norm", "0", "100", "0.1000 ± 0.0100")
    assert rows[1][1] == "acc", "WinoGrande's metric"
    assert rows[-1] == ("the paper's five", "mean", "", "", "0.3000")


def test_beside_the_dense_decoder_every_row_has_what_changed():
    rows = task_rows(five(), five(0.1))
    assert rows[0][-3:] == ("0.2000 ± 0.0100", "0.1000 ± 0.0100", "-0.1000")
    assert rows[-1][-3:] == ("0.4000", "0.3000", "-0.1000")


def test_there_is_no_average_of_less_than_five_or_of_other_metrics():
    assert found().average is None and len(task_rows(found())) == 1
    assert "without winogrande, hellaswag, arc_easy, arc_challenge" in task_notes(found())[-1]
    other = found(0, *(score(task, metric="acc") for task in PAPER_METRICS))
    assert other.average is None
    assert not any("average" in note for note in task_notes(found(0, score("mine"))))


def test_a_part_of_the_questions_is_marked():
    part = score(samples=7)
    assert "7 of 100 questions" in task_line(part)
    assert any("the limit of questions cuts piqa short" in note for note in task_notes(found(0, part)))


def test_json_has_every_metric():
    plain = tasks_plain(five())
    assert plain["average"] == 0.3 and plain["scores"][0]["metrics"] == {"acc": 0.6, "acc_norm": 0.1}
    assert plain["scores"][0]["shots"] == 0 and plain["scores"][0]["version"] == "1.0"
