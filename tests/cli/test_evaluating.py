"""eval: perplexity, tasks, and how alike two decoders predict."""

import json
from pathlib import Path

import pytest

from dispfx.quality.agreement import Agreement
from dispfx.quality.perplexity import Perplexity
from tests.cli.asked import asked
from tests.report.runs import with_weights, write_run
from tests.report.test_tasks import found


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text("{}")
    return tmp_path


def test_eval_shows_the_figure_with_its_protocol(dispfx, replaced, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("text")
    protocol = {"text": "text.txt", "context": 128, "windows": 4, "tokens": 508, "held_out_share": None}
    evaluate = replaced("evaluate", Perplexity(3.25, protocol))
    result = dispfx("eval", "demo", "--eval-data", text, "--eval-windows", 4, "--context", 128)
    assert result.exit_code == 0, result.output
    given = asked(evaluate)
    assert given["eval_windows"] == 4 and given["context"] == 128
    assert result.stdout == "perplexity 3.250  (4 windows of 128 tokens, 508 predicted)\n"

    as_json = dispfx("eval", "demo", "--eval-data", text, "--json")
    assert json.loads(as_json.stdout) == {
        "model": "demo", "dense_model": None, "perplexity": 3.25, "protocol": protocol
    }  # fmt: skip


def test_eval_refuses_a_missing_text(dispfx, replaced):
    evaluate = replaced("evaluate")
    assert dispfx("eval", "demo", "--eval-data", "absent.txt").exit_code == 2
    assert not evaluate.called


def test_eval_refuses_a_file_in_place_of_the_folder_before_it_measures(dispfx, replaced, tmp_path: Path):
    evaluate = replaced("evaluate")
    text = tmp_path / "text.txt"
    text.write_text("text")
    result = dispfx("eval", "demo", "--eval-data", text, "--out", text)
    assert result.exit_code == 2 and "this is a file" in result.stderr
    assert not evaluate.called and text.read_text() == "text"


def test_eval_beside_the_dense_decoder_says_how_alike_both_predict(dispfx, replaced, written: Path):
    text = written / "text.txt"
    text.write_text("text")
    protocol = {"text": "text.txt", "context": 128, "windows": 4, "tokens": 508, "held_out_share": None}
    replaced("evaluate", Perplexity(3.25, protocol))
    agree = replaced("agree", Agreement(0.0123, 0.875, 508))
    result = dispfx("eval", written, "--eval-data", text, "--dense", "demo")
    assert result.exit_code == 0, result.output
    assert "KL 0.0123 nats" in result.stdout and "87.5% of 508" in result.stdout
    assert (asked(agree)["model"], asked(agree)["dense"]) == (str(written), "demo")
    assert agree.call_args.kwargs == {"context": 128, "eval_windows": 4}
    shown = json.loads(dispfx("eval", written, "--eval-data", text, "--dense", "demo", "--json").stdout)
    assert shown["agreement"] == {"kl_nats": 0.0123, "top1": 0.875, "tokens": 508}
    assert dispfx("eval", "demo", "--eval-data", text, "--dense", "demo").exit_code == 2


def test_tasks_are_asked_for_by_name_and_no_text_is_needed(dispfx, replaced, tmp_path: Path):
    score = replaced("score_tasks", found())
    evaluate = replaced("evaluate")
    result = dispfx(
        "eval", "demo", "--tasks", "piqa, mine", "--tasks", "other", "--task-folder", tmp_path, "--shots", 5,
        "--limit", 10, "--batch-size", 4, "--context", 64,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    given = asked(score)
    names = score.call_args.args[0].evaluation.task_names
    assert (given["model"], names) == ("demo", ["piqa", "mine", "other"])
    assert (given["task_folder"], given["shots"], given["limit"]) == (tmp_path, 5, 10)
    assert (given["batch_size"], given["context"]) == (4, 64)
    assert not evaluate.called
    assert "0.6100 ± 0.0100" in result.stdout and "lm-eval 0.4.13; at most 64 tokens" in result.stdout


def test_tasks_beside_the_dense_decoder_are_measured_twice(dispfx, replaced, written: Path):
    score = replaced("score_tasks")
    score.side_effect = [found(), found(0.05)]
    result = dispfx("eval", written, "--tasks", "piqa", "--dense", "demo", "--out", written)
    assert result.exit_code == 0, result.output
    assert [call.args[0].model.model for call in score.call_args_list] == [str(written), "demo"]
    assert "-0.0500" in result.stdout and str(written / "eval.json") in result.stdout
    shown = json.loads((written / "eval.json").read_text())
    assert shown["tasks"]["scores"][0]["value"] == 0.61
    assert shown["dense_tasks"]["versions"]["lm-eval"] == "0.4.13"
    page = (written / "eval.md").read_text()
    assert "| piqa | acc_norm | 0 |" in page and "lm-eval 0.4.13" in page


def test_tasks_as_json_are_one_document(dispfx, replaced):
    replaced("score_tasks", found())
    shown = json.loads(dispfx("eval", "demo", "--tasks", "piqa", "--json").stdout)
    assert shown["tasks"]["context"] == 64 and shown["tasks"]["average"] is None
    assert shown["tasks"]["scores"][0]["samples"] == 100 and "perplexity" not in shown
    assert dispfx("eval", "demo", "--tasks", "piqa", "--quiet").output == ""


def test_eval_of_nothing_and_a_folder_of_tasks_that_is_none_are_refused(dispfx, replaced, tmp_path: Path):
    score = replaced("score_tasks")
    nothing = dispfx("eval", "demo")
    assert nothing.exit_code == 2 and "--tasks" in nothing.stderr and "--eval-data" in nothing.stderr
    assert dispfx("eval", "demo", "--tasks", " , ").exit_code == 2
    absent = dispfx("eval", "demo", "--tasks", "piqa", "--task-folder", tmp_path / "absent")
    assert absent.exit_code == 2 and "--task-folder" in absent.stderr
    assert not score.called


@pytest.mark.parametrize("model", ["demo", "other"])
def test_an_evaluation_is_not_written_into_the_folder_of_another_decoder(
    dispfx, replaced, tmp_path: Path, model: str
):
    evaluate = replaced("evaluate", Perplexity(3.25, {"context": 8, "windows": 1, "tokens": 7}))
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other")
    own = with_weights(one)
    with_weights(other, "of another")
    text = tmp_path / "text.txt"
    text.write_text("text")
    measured = other if model == "other" else model
    result = dispfx("eval", measured, "--eval-data", text, "--out", one)
    assert result.exit_code == 2 and "the folder of another decoder" in result.stderr
    assert not evaluate.called and not (one / "eval.json").exists()
    assert dispfx("eval", one, "--eval-data", text, "--out", one).exit_code == 0
    assert json.loads((one / "eval.json").read_text())["decoder"] == own
