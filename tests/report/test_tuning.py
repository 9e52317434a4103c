"""A tuned run tells so wherever it is shown."""

import json
from dataclasses import replace
from pathlib import Path

from dispfx.report import FolderContents, Protocol, Tuning, load_report, model_card, save_report
from dispfx.report.page import write_page
from dispfx.report.run import read_run
from dispfx.report.run_comparison import run_notes
from dispfx.report.tuning_record import adapter_card, write_record
from tests.report.runs import write_run

TOLD = Tuning(
    "out/demo",
    "text.txt",
    960,
    5.0,
    4.25,
    Protocol("held.txt", 128, 2, 254, None),
    8,
    16.0,
    1e-3,
    5,
    2,
    16,
    3,
)


def test_report_card_page_and_comparison_say_that_the_weights_were_tuned(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    report = replace(load_report(folder / "report.json"), tuned=TOLD, perplexity=None)
    save_report(report, folder / "report.json")
    assert load_report(folder / "report.json") == report
    write_page(folder)
    card = model_card(report, FolderContents("run"), base_model="out/demo")
    page = (folder / "report.html").read_text(encoding="utf-8")
    (note,) = run_notes([read_run(folder)])
    for shown in (card, page, note):
        assert "perplexity 5.000 before and 4.250 after tuning" in shown
    assert "differ from the original's" in card and "the weights before they were tuned" in card
    assert note.startswith("run: ") and "254 predicted" in note


def test_adapters_have_a_card_that_loads_them_and_a_record(tmp_path: Path):
    card = adapter_card(TOLD, "adapters")
    assert 'from_pretrained("demo")' in card and '(model, "adapters")' in card
    assert "rank 8 (alpha 16), 960 trained" in card
    write_record(tmp_path, TOLD, [])
    record = json.loads((tmp_path / "finetune.json").read_text())
    assert record["after"] == 4.25 and record["log"] == []
