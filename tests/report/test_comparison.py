"""Runs side by side."""

import json
from pathlib import Path

from dispfx.report.json_form import load_report, save_report
from dispfx.report.run import read_run
from dispfx.report.run_comparison import ordered, run_notes, run_rows, runs_plain, speedup
from tests.report.runs import with_weights, write_run


def row(kind: str, value: float | None) -> dict:
    return {"kind": kind, "speedup": value, "shape": {"batch": 1}}


def changed(folder: Path, **changes) -> Path:
    plain = json.loads((folder / "report.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = plain
        for parent in parents:
            place = place[parent]
        place[last] = value
    (folder / "report.json").write_text(json.dumps(plain))
    save_report(load_report(folder / "report.json"), folder / "report.json")
    return folder


def test_runs_come_by_what_they_remove(tmp_path: Path):
    more = changed(write_run(tmp_path / "more"), ratio__achieved=0.5)
    runs = [read_run(more), read_run(write_run(tmp_path / "less"))]
    assert [run.name for run in ordered(runs)] == ["less", "more"]
    assert [cells[1] for cells in run_rows(runs)] == ["30.04% of blocks", "50.00% of blocks"]
    assert [plain["run"] for plain in runs_plain(runs)] == ["less", "more"]
    assert run_notes(runs) == []


def test_figures_that_cannot_be_compared_are_said_to_be_so(tmp_path: Path):
    one = read_run(write_run(tmp_path / "one"))
    other_text = read_run(changed(write_run(tmp_path / "two"), perplexity__protocol__windows=3))
    other_decoder = read_run(changed(write_run(tmp_path / "three"), perplexity__dense=9.0, ratio__of="total"))
    assert "different texts or windows" in run_notes([one, other_text])[0]
    assert "dense decoders" in run_notes([one, other_decoder])[0]
    assert "ratios" in run_notes([one, other_decoder])[1]


def test_the_speed_is_the_median_of_what_was_measured(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    assert speedup(read_run(folder), "prefill") is None
    rows = [row("prefill", 1.0), row("prefill", 3.0), row("prefill", 1.2), row("decode", None)]
    (folder / "speed.json").write_text(json.dumps({"rows": rows, "decoder": with_weights(folder)}))
    run = read_run(folder)
    assert speedup(run, "prefill") == 1.2 and speedup(run, "decode") is None
    assert run_rows([run])[0][7:9] == ("1.20", "—")


def test_a_run_without_perplexity_has_a_dash_and_a_failed_line_is_said(tmp_path: Path):
    folder = changed(write_run(tmp_path / "run"), perplexity=None)
    plain = json.loads((folder / "report.json").read_text())
    plain["verify"][0]["max_rel_error"] = 1.0
    (folder / "report.json").write_text(json.dumps(plain))
    cells = run_rows([read_run(folder)])[0]
    assert cells[4] == "—" and cells[-1] == "NO"
