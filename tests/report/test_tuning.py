"""A recovered decoder tells so wherever it is shown."""

import json
from dataclasses import replace
from pathlib import Path

from dispfx.learning.distillation import HeldOut
from dispfx.report import FolderContents, Protocol, Tuning, load_report, model_card, save_report
from dispfx.report.page import write_page
from dispfx.report.run import read_run
from dispfx.report.run_comparison import run_notes
from dispfx.report.table import report_rows
from dispfx.report.tuning_record import adapter_card, read_record, write_record
from tests.report.runs import write_run

TOLD = Tuning(
    base="out/demo",
    dense="demo",
    train="lora",
    data="text.txt",
    parameters=960,
    before=5.0,
    after=4.25,
    protocol=Protocol("held.txt", 128, 2, 254, None),
    kl_before=0.9,
    kl_after=0.4,
    kl_text="second.txt",
    kl_tokens=512,
    kept=True,
    held_out=(HeldOut(0, 0.8), HeldOut(5, 0.3)),
    steps_done=5,
    rank=8,
    alpha=16.0,
    lr=1e-3,
    steps=10,
    batch_size=2,
    seq_len=16,
    seed=3,
)


def test_report_card_page_and_comparison_say_what_recovery_was_worth(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    report = replace(load_report(folder / "report.json"), tuned=TOLD)
    save_report(report, folder / "report.json")
    assert load_report(folder / "report.json") == report
    write_page(folder)
    card = model_card(report, FolderContents("run"), base_model="out/demo")
    page = (folder / "report.html").read_text(encoding="utf-8")
    (note,) = run_notes([read_run(folder)])
    for shown in (card, page, note):
        assert "KL to the dense decoder 0.9000 before and 0.4000 after recovery" in shown
    assert "perplexity 5.000 before and 4.250 after recovery" in card and "254 predicted" in page
    assert "differ from the original's" in card and "the weights before they were tuned" in card
    assert note.startswith("run: ") and "512 tokens of second.txt" in note
    rows = report_rows(report)[1]
    assert ("KL, pruned and recovered", "0.9000", "0.4000", "-55.6%") in rows


def test_adapters_have_a_card_that_loads_them_and_a_record(tmp_path: Path):
    card = adapter_card(TOLD, "adapters")
    assert 'from_pretrained("demo")' in card and '(model, "adapters")' in card
    assert "LoRA adapters of rank 8 (alpha 16), 960 numbers" in card and "5 of 10 steps" in card
    write_record(tmp_path, TOLD, [])
    record = json.loads((tmp_path / "recovery.json").read_text())
    assert record["after"] == 4.25 and record["log"] == [] and read_record(tmp_path) == TOLD


def test_weights_that_were_left_alone_are_told(tmp_path: Path):
    card = model_card(
        replace(load_report(write_run(tmp_path / "run") / "report.json"), tuned=replace(TOLD, kept=False)),
        FolderContents("run"),
        base_model="demo",
    )
    assert "the weights were left as they were, because KL had not fallen" in card
