"""eval.json and eval.md, and their part of the page."""

from dataclasses import replace
from pathlib import Path

import pytest

from dispfx.errors import DataError
from dispfx.quality.agreement import Agreement
from dispfx.quality.perplexity import Perplexity
from dispfx.report.evaluation import Evaluation, read_evaluation, write_evaluation
from dispfx.report.page import write_page
from tests.report.runs import with_weights, write_run
from tests.report.test_tasks import five

PROTOCOL = {"text": "a<b.txt", "context": 128, "windows": 4, "tokens": 508, "held_out_share": None}
WHOLE = Evaluation(
    "out/demo", "demo", Perplexity(3.25, PROTOCOL), Agreement(0.01, 0.9, 508), five(), five(0.1)
)


@pytest.mark.parametrize("found", [WHOLE, Evaluation("demo", tasks=five()), Evaluation("demo")])
def test_what_is_written_is_read_back(found: Evaluation, tmp_path: Path):
    files = write_evaluation(found, tmp_path / "made")
    assert [file.name for file in files] == ["eval.json", "eval.md"]
    assert read_evaluation(files[0]) == found


def test_no_file_is_no_evaluation_and_a_damaged_one_is_refused(tmp_path: Path):
    path = tmp_path / "eval.json"
    assert read_evaluation(path) is None
    for text in ("{", "[1]", '{"model": 3}', '{"model": "demo", "tasks": {"scores": [{"task": "piqa"}]}}'):
        path.write_text(text)
        with pytest.raises(DataError):
            read_evaluation(path)


def test_markdown_and_page_show_every_score_and_how_it_was_measured(tmp_path: Path):
    folder = write_run(tmp_path / "run", steps=0)
    write_evaluation(replace(WHOLE, decoder=with_weights(folder)), folder)
    write_page(folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    for shown in (page, (folder / "eval.md").read_text(encoding="utf-8")):
        for expected in ("KL 0.0100 nats", "perplexity 3.250", "acc_norm", "lm-eval 0.4.13", "-0.1000"):
            assert expected in shown, expected
    assert "Measured by dispfx eval" in page and "the paper&#x27;s five" in page
