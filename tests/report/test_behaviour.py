"""KL leads wherever quality is shown, and a flattered perplexity is named."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dispfx.report import Behaviour, FolderContents, Report, TerminalObserver, from_json, model_card, to_json
from dispfx.report.run import read_run
from dispfx.report.run_comparison import run_rows, runs_plain
from dispfx.report.table import flattered_notes, report_rows
from tests.report.runs import write_run

OWN = Behaviour("text.txt", 5_080, 0.0625, 0.875, 3.2, 3.28)
OTHER = Behaviour("mixed text of dispfx", 2_000, 0.25, 0.75, 20.0, 26.0)
FLATTERED = replace(OWN, perplexity_pruned=3.0)


@pytest.fixture
def measured(report: Report) -> Report:
    return replace(report, behaviour=(OWN, OTHER))


def test_the_table_begins_quality_with_kl_and_has_each_text(measured: Report):
    names = [row[0] for row in report_rows(measured)[1]]
    assert names[:4] == [
        "KL per token",
        "perplexity (40 × 128 tokens)",
        "KL per token, mixed text of dispfx",
        "perplexity, mixed text of dispfx",
    ]
    assert report_rows(measured)[1][0][1:] == ("0", "0.0625 nats", "87.5% the same first choice")


def test_the_card_has_both_texts(measured: Report):
    card = model_card(measured, FolderContents("out"), base_model="demo")
    assert "| KL per token | 0 | 0.0625 (87.5%) |\n| perplexity | 3.200 | 3.280 |" in card
    assert "| perplexity, mixed text of dispfx | 20.000 | 26.000 |" in card


def test_the_file_keeps_it_and_a_report_without_it_is_read(measured: Report, report: Report):
    assert from_json(to_json(measured)).behaviour == (OWN, OTHER)
    assert '"kl": 0.0625' in to_json(measured)
    assert from_json(to_json(report)).behaviour == () and "behaviour" not in to_json(report)


def test_a_perplexity_that_falls_while_the_behaviour_changes_is_named(report: Report):
    fell = replace(report, behaviour=(FLATTERED, OTHER))
    (note,) = flattered_notes(fell)
    assert note.startswith("perplexity on text.txt fell below the dense decoder's, and KL is 0.062")
    assert not flattered_notes(replace(report, behaviour=(OWN, OTHER, replace(FLATTERED, kl=0.001))))
    printed = io.StringIO()
    TerminalObserver(Console(file=printed, width=200)).finished(fell)
    assert note in printed.getvalue()


def test_runs_are_compared_by_kl(measured: Report, tmp_path: Path):
    run = replace(read_run(write_run(tmp_path / "run")), report=measured)
    assert run_rows([run])[0][4:6] == ("0.0625", "3.280")
    assert runs_plain([run])[0]["kl"] == 0.0625
