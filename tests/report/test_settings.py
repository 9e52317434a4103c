"""The settings of a run, as they stand on the page and on the model card."""

from dataclasses import replace
from pathlib import Path

from dispfx.report import FolderContents, Report, model_card, save_report
from dispfx.report.page import write_page
from dispfx.report.settings_table import settings_rows
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.trees import RunSettings
from tests.report.runs import write_run

RUN = RunSettings.of(model="demo", ratio=0.3, align=8)
SET = RUN.fitted(LearnSettings(lr=3e-3, lambda_=7.0, antithetic=True)).plain()


def test_every_setting_is_a_row_with_its_value():
    rows = dict(settings_rows(SET))
    assert rows["steps"] == "10,000" and rows["lr"] == "0.003" and rows["lambda"] == "7.0"
    assert rows["antithetic"] == "yes" and rows["constrained"] == "no" and rows["data bytes"] == "134,217,728"
    assert rows["budget on"] == "masks" and len(rows) == 29


def test_a_score_has_the_rows_of_what_it_looks_at():
    scored = RUN.fitted(LearnSettings(method="magnitude"))
    names = [name for name, _ in settings_rows(scored.plain())]
    assert names == [
        "method",
        "seq len",
        "batch size",
        "constrained",
        "seed",
        "align",
        "select",
        "data bytes",
        "bos",
    ]


def test_the_card_has_them_where_there_are_some(report: Report):
    card = model_card(replace(report, settings=SET), FolderContents("out"), base_model="demo")
    assert "| lr | 0.003 |" in card and "| align | 8 |" in card
    assert "setting" not in model_card(report, FolderContents("out"), base_model="demo")


def test_the_page_has_them(report: Report, tmp_path: Path):
    folder = write_run(tmp_path / "run")
    page = write_page(folder)[0].read_text(encoding="utf-8")
    assert '<th scope="col">setting</th>' not in page
    save_report(replace(report, settings=SET), folder / "report.json")
    page = write_page(folder)[0].read_text(encoding="utf-8")
    assert '<th scope="row">lambda</th><td>7.0</td>' in page
