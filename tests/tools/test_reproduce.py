"""The paper's tables: runs are shared, go on where they were cut off, and say so where they were not run."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dispfx.run.run_text
from tests.local_tasks import write_tasks

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--steps", "2", "--windows", "1", "--batch-size", "2", "--seq-len", "32", "--device", "cpu"]
FEW = ["--ratios", "0.3", "--lambdas", "2", "6", "--seeds", "0", "1", "--price", "2"]
SMALLER_TEXT = 40_000

pytestmark = [pytest.mark.long, pytest.mark.pictures]


@pytest.fixture(scope="module")
def reproduce() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        module = importlib.import_module("reproduce")
        runs = sys.modules["reproduction.runs"]
        assert runs.__file__ is not None and Path(runs.__file__).is_relative_to(TOOLS)
        patch.setattr(dispfx.run.run_text, "_DEMO_CHARACTERS", SMALLER_TEXT)
        patch.setattr(runs, "_OTHER_LINES", 1_000)
        # Neither changes what it is given, and opening takes longer than two steps.
        patch.setattr(runs, "load_source", cache(runs.load_source))
        patch.setattr(runs, "capture", cache(runs.capture))
        patch.setattr(sys.modules["reproduction.tables"], "_METHODS", ("random",))
        others = sys.modules["reproduction.others"]
        patch.setitem(others._SHAPES, "cpu", others._SHAPES["cpu"][1:2])
        yield module


@pytest.fixture(scope="module")
def made(reproduce: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tables")
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    folder = write_tasks(tmp_path_factory.mktemp("questions"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        words = ["all", "--out", str(out), "--task-folder", str(folder), "--task-limit", "2"]
        assert reproduce.main([*words, *SMALL, *FEW]) == 0
    return out


def table(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / f"{name}.json").read_text())


def column(out: Path, name: str, title: str) -> list[str]:
    found = table(out, name)
    at = found["header"].index(title)
    return [row[at] for row in found["rows"]]


def test_every_table_is_made_and_stands_on_the_page(reproduce: ModuleType, made: Path):
    page = (made / "tables.md").read_text()
    for name in reproduce.TABLES:
        found = table(made, name)
        assert f"## {found['title']}\n" in page and found["rows"]
        assert {len(row) for row in found["rows"]} == {len(found["header"])}
        assert f"![{found['picture']}]({name}.png)" in page or found["picture"] is None
    assert (made / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "2 steps of 2 × 32 tokens" in page and "torch" in page


def test_figures_of_a_table_are_those_of_its_runs(made: Path):
    values = [float(value) for value in column(made, "ratio", "perplexity")]
    assert values == sorted(values) and len(set(values)) == 2
    run = json.loads((made / "runs" / "0.3" / "run.json").read_text())
    assert f"{run['perplexity'][0]:.3f}" == column(made, "ratio", "perplexity")[1]
    assert all(abs(float(points)) < 0.1 for points in column(made, "compression", "off by (points)"))
    assert column(made, "ratio", "paper") == ["—"] * 2
    notes = " ".join(table(made, "seeds")["notes"])
    mean = sum(float(value) for value in column(made, "seeds", "perplexity")) / 2
    (told,) = re.findall(r"Perplexity ([\d.]+) ± [\d.]+ over 2 seeds", notes)
    assert float(told) == pytest.approx(mean, abs=1.1e-3), "of figures before they were rounded"


def test_tables_share_their_runs(made: Path):
    names = sorted(path.name for path in (made / "runs").iterdir())
    assert "0.5" in names and "0.5,lambda_=6.0" not in names and "0.5,seed=0" not in names
    assert {"0.5,seed=1", "0.5,constrained=True", "0.5,other-text", "0.5,method=random"} <= set(names)
    assert not list(made.rglob("learning.safetensors")), "no state is left of a complete run"


def test_tasks_are_asked_of_the_dense_and_of_each_pruned_decoder(made: Path):
    found = table(made, "tasks")
    assert [row[0] for row in found["rows"]] == ["dense", "30% removed"]
    assert all(0 <= float(cell) <= 100 for row in found["rows"] for cell in row[1:7])
    assert "winogrande by acc," in found["notes"][0] and "cuts" in " ".join(found["notes"])


def test_the_demo_is_asked_for_its_own_skills_where_no_tasks_are_named(
    reproduce: ModuleType, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    for file in copy.rglob("tasks.json"):
        file.unlink()
    monkeypatch.setattr(importlib.import_module("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert reproduce.main(["tasks", "--out", str(copy), "--task-limit", "6", *SMALL, *FEW]) == 0
    found = table(copy, "tasks")
    assert found["header"] == ["", "copy", "recall", "arithmetic", "counting", "agreement"]
    assert {row[0]: row[1] for row in found["rows"]}["dense"] == "100.00", "the demo copies without a mistake"
    notes = " ".join(found["notes"])
    assert "6 questions each" in notes and "Not run: piqa, winogrande" in notes


def test_figures_of_the_paper_are_said_to_be_second_hand(reproduce: ModuleType, made: Path):
    assert "6.85 at 30%" in table(made, "ratio")["notes"][0]
    assert sys.modules["reproduction.paper"].SECOND_HAND in table(made, "ratio")["notes"][0]


def test_tasks_without_their_data_cost_their_cells_alone(reproduce: ModuleType, made: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    for file in copy.rglob("tasks.json"):
        file.unlink()
    words = ["tasks", "--out", str(copy), "--tasks", "no_such_task", *SMALL, *FEW]
    assert reproduce.main(words) == 1
    assert [row[1][:9] for row in table(copy, "tasks")["rows"]] == ["DataError", "not run"]


def test_the_pages_can_be_made_again_without_learning(reproduce: ModuleType, made: Path, monkeypatch):
    runs = sys.modules["reproduction.runs"]
    monkeypatch.setattr(runs, "learn", None)
    before = {path: path.read_bytes() for path in made.glob("*.md")}
    assert reproduce.main(["all", "--render", "--out", str(made), *SMALL, *FEW]) == 0
    assert {path: path.read_bytes() for path in made.glob("*.md")} == before


def test_a_folder_holds_runs_of_one_kind(reproduce: ModuleType, made: Path, capsys):
    assert reproduce.main(["ratio", "--out", str(made), *SMALL[:-2], "--align", "8", *FEW]) == 2
    assert "differ in align" in capsys.readouterr().err


def test_what_was_not_run_says_so(reproduce: ModuleType, tmp_path: Path):
    words = ["ratio", "curves", "texts", "throughput", "samples", "--out", str(tmp_path), "--render"]
    assert reproduce.main([*words, *SMALL, *FEW]) == 0
    assert [row[1] for row in table(tmp_path, "ratio")["rows"]][1:] == ["not run"]
    for name in ("curves", "texts", "throughput"):
        rows = table(tmp_path, name)["rows"]
        assert rows and all("not run" in row for row in rows), name
    rows = table(tmp_path, "samples")["rows"]
    assert rows and all(row[-1] == "not run" and row[1] != "not run" for row in rows)
    assert not (tmp_path / "curves.png").exists()


def test_a_run_that_fails_costs_its_row_alone(reproduce: ModuleType, tmp_path: Path, capsys):
    words = ["ratio", "--out", str(tmp_path), *SMALL, "--ratios", "0.3", "1.5"]
    assert reproduce.main(words) == 1
    rows = table(tmp_path, "ratio")["rows"]
    assert rows[2][1].startswith("BudgetError") and float(rows[1][1]) > 1
    assert "failed: 1.5" in capsys.readouterr().err


def test_a_run_that_was_cut_off_goes_on(reproduce: ModuleType, tmp_path: Path, monkeypatch):
    runs, setup_of = sys.modules["reproduction.runs"], sys.modules["reproduction.setup"].Setup.of
    settings = {"steps": 3, "batch_size": 2, "seq_len": 32}
    common = sys.modules["reproduction.setup"].Common(settings=settings, windows=1)
    whole = runs.Bench(common, tmp_path / "whole")
    expected = whole.plan(setup_of(0.5))

    def stop(record):
        if record.step == 2:
            raise KeyboardInterrupt

    learn = runs.learn
    monkeypatch.setattr(
        runs, "learn", lambda *args, watch, **named: learn(*args, watch=replace(watch, on_step=stop), **named)
    )
    with pytest.raises(KeyboardInterrupt):
        runs.Bench(common, tmp_path / "cut").run(setup_of(0.5))
    monkeypatch.setattr(runs, "learn", learn)
    again = runs.Bench(common, tmp_path / "cut")
    found, outcome = again.plan(setup_of(0.5)), again.run(setup_of(0.5))
    pairs = zip(found.selections, expected.selections, strict=True)
    assert all(torch.equal(one.kept, other.kept) for one, other in pairs)
    assert [record.step for record in again.steps(setup_of(0.5))] == [1, 2, 3]
    assert outcome.learning_seconds is None and outcome.perplexity == whole.run(setup_of(0.5)).perplexity


@pytest.mark.parametrize(("damage", "said"), [('{"perplexity": [1.0]}', "has no achieved"), ("{", "damaged")])
def test_a_damaged_run_is_named(
    reproduce: ModuleType, made: Path, tmp_path: Path, damage: str, said: str, capsys
):
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    (copy / "runs" / "0.5" / "run.json").write_text(damage)
    assert reproduce.main(["seeds", "--render", "--out", str(copy), *SMALL, *FEW]) == 2
    told = capsys.readouterr().err
    assert said in told and "0.5/run.json" in told and "remove it" in told


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("organisation/Llama-2-7b-hf", "LLaMA-2-7B"),
        ("llama-13b", "LLaMA-13B"),
        ("models/Llama-2-13b-chat", "LLaMA-2-13B"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", None),
        ("llama-2-70b", None),
        ("demo", None),
    ],
)
def test_the_papers_decoders_are_known_by_name(reproduce: ModuleType, model: str, known: str | None):
    assert sys.modules["reproduction.paper"].family(model) == known
