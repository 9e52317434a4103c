"""bench: the folder's decoder beside the dense one, and what it refuses."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dispfx
from dispfx.api import bench
from dispfx.benchmark.alignments import MeasuredOn, measured_plans, realigned
from dispfx.benchmark.decoder_speed import Contender, compare
from dispfx.benchmark.speed_row import SpeedRow
from dispfx.benchmark.timing import compare_times
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.programs import only_planned
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.ops import is_grouped
from dispfx.plan.plan import Plan
from dispfx.quality.perplexity import TextFacts, measure
from dispfx.run.opening import open_model
from dispfx.settings import ModelSettings
from tests.api.conftest import Compiled
from tests.captures import plain
from tests.tiny_transformers import tiny_transformer

# The room, which the function of its name hides.
bench_room = importlib.import_module("dispfx.api.benching")


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time each side for a tenth as long: that every step is timed is shown, not what it takes."""
    for room in ("dispfx.benchmark.decoder_speed", "dispfx.benchmark.onnx_comparison"):
        monkeypatch.setattr(f"{room}.compare_times", partial(compare_times, round_seconds=0.005))


@pytest.fixture(scope="module")
def pruned_folder(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> Path:
    """A transformers decoder, pruned at random and written."""
    model = open_model(ModelSettings(str(decoder_folder))).model
    plan = Plan.random(dispfx.capture(model), 0.4, seed=0)
    out = tmp_path_factory.mktemp("bench") / "out"
    dispfx.api.apply(str(decoder_folder), plan, out=out, export="none")
    return out


def test_every_step_is_timed_dense_and_pruned(pruned_folder: Path, decoder_folder: Path):
    seen: list[SpeedRow] = []
    benched = bench(
        pruned_folder,
        dense=str(decoder_folder),
        batch=(1, 3),
        prompt=(5,),
        past=(4, 9),
        mode="eager",
        on_row=seen.append,
    )
    assert list(benched.rows) == seen
    assert [tuple(row.shape) for row in seen] == [
        (1, 5, 0), (3, 5, 0), (1, 1, 4), (3, 1, 4), (1, 1, 9), (3, 1, 9),
    ]  # fmt: skip
    for row in seen:
        assert row.note == "" and row.dense is not None and row.pruned is not None and row.speedup is not None
        assert row.dense.seconds > 0 < row.pruned.seconds and 1.0 < row.bound < 1 / 0.6
        assert row.dense.least_seconds <= row.dense.seconds
    assert "40.0% of the prunable weights removed" in benched.facts["parameters"]


def test_without_a_dense_model_its_class_is_timed_with_random_weights(pruned_folder: Path):
    benched = bench(pruned_folder, batch=(1,), prompt=(4,), past=(3,), mode="eager")
    assert len(benched.rows) == 2 and all(row.speedup for row in benched.rows)
    assert benched.facts["dense"] == "the same class with random weights"


def test_a_mixture_gathers_weights_for_a_single_token_and_sorts_many(tmp_path: Path, monkeypatch):
    """Gathering them for a prompt would hold a copy of an expert for every token."""
    model: Any = tiny_transformer("mixtral", layers=1)
    model.save_pretrained(tmp_path / "dense")
    plan = Plan.random(dispfx.capture(model), 0.4, seed=0)
    out = tmp_path / "out"
    dispfx.api.apply(str(tmp_path / "dense"), plan, out=out, export="none")
    grouped: dict[tuple[int, ...], tuple[bool, bool]] = {}

    def watched(name: str, dense: Contender, pruned: Contender, shape: CachedShape, *args: Any, **how: Any):
        grouped[tuple(shape)] = (_is_grouped(dense), _is_grouped(pruned))
        return compare(name, dense, pruned, shape, *args, **how)

    monkeypatch.setattr(bench_room, "compare", watched)
    steps: dict[str, Any] = {"batch": (1, 2), "prompt": (6,), "past": (3,), "mode": "eager"}
    rows = bench(out, **steps, align=(4,)).rows
    assert all(row.speedup for row in rows) and len({row.name for row in rows}) == 2
    assert grouped == {
        (1, 6, 0): (True, True), (2, 6, 0): (True, True), (1, 1, 3): (False, False), (2, 1, 3): (True, True),
    }  # fmt: skip


def _is_grouped(contender: Contender) -> bool:
    return any(map(is_grouped, contender.fast.graph.nodes))


def test_alignments_are_timed_and_measured_on_the_plan(
    pruned_folder: Path, decoder_folder: Path, tmp_path: Path
):
    """Coarser widths leave fewer plans to choose from; where nothing has to change, the plan is the same."""
    text = tmp_path / "tokens.safetensors"
    save_file({"tokens": torch.randint(61, (300,), generator=torch.Generator().manual_seed(0))}, text)
    benched = bench(
        pruned_folder,
        dense=str(decoder_folder),
        batch=(1,),
        prompt=(4, 6),
        past=(3,),
        mode="eager",
        align=(1, 8),
        eval_data=str(text),
        eval_windows=1,
    )
    aligned = [row for row in benched.rows if row.name.startswith("widths")]
    assert [(row.name.split(",")[0], tuple(row.shape)) for row in aligned] == [
        ("widths × 1", (1, 6, 0)), ("widths × 8", (1, 6, 0)),
        ("widths × 1", (1, 1, 3)), ("widths × 8", (1, 1, 3)),
    ]  # fmt: skip
    assert all(row.speedup for row in aligned)
    found = dict(each.rsplit(" ", 1) for each in benched.facts["perplexity of the plan"].split(", "))
    assert set(found) == {"as it is", "× 1", "× 8"} and found["as it is"] == found["× 1"]
    with pytest.raises(DataError, match="use `runtime='torch'`"):
        bench(pruned_folder, align=(8,), runtime="onnx")
    short = tmp_path / "short.safetensors"
    save_file({"tokens": torch.randint(61, (20,))}, short)
    with pytest.raises(DataError, match="which features come or go"):
        bench(pruned_folder, dense=str(decoder_folder), align=(8,), eval_data=str(short))
    with pytest.raises(DataError, match="`align` is not given"):
        bench(pruned_folder, dense=str(decoder_folder), eval_data=str(text))
    with pytest.raises(DataError, match="`dense`"):
        bench(pruned_folder, align=(8,), eval_data=str(text))


def test_branches_that_were_skipped_stay_whole_at_an_alignment(decoder_folder: Path, tmp_path: Path):
    model = open_model(ModelSettings(str(decoder_folder))).model
    program = dispfx.capture(model)
    skipped = program.branches[0].name
    plan = Plan.random(dispfx.capture(model, skip=[skipped]), 0.3, seed=0)
    save_file({"tokens": torch.randint(61, (64,))}, tmp_path / "tokens.safetensors")
    on = MeasuredOn.read(str(tmp_path / "tokens.safetensors"), None, 16)
    cached = only_planned(capture_cached(model), plan)
    (same, whole), (coarse, _) = measured_plans(cached, plan, (8,), on)
    assert all(torch.equal(kept, plan.kept[name]) for name, kept in same.kept.items())
    assert set(coarse.kept) == set(plan.kept) and not any(name.startswith(skipped) for name in coarse.kept)
    without_cache = measure(
        dispfx.lower(only_planned(program, plan), plan),
        on.tokens,
        context=16,
        device="cpu",
        text=TextFacts("", None),
    )
    assert whole == pytest.approx(without_cache.value, rel=1e-5)


@pytest.mark.parametrize("with_text", [True, False])
def test_the_dense_decoder_is_captured_once_and_one_plan_is_measured_and_timed(
    pruned_folder: Path,
    decoder_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_text: bool,
):
    text = tmp_path / "tokens.safetensors"
    save_file({"tokens": torch.randint(61, (300,), generator=torch.Generator().manual_seed(0))}, text)
    captured: list[bool] = []
    made: list[list[Plan]] = []
    timed: list[float] = []

    def capture(model: Any, **how: Any):
        captured.append(any(parameter.is_meta for parameter in model.parameters()))
        return capture_cached(model, **how)

    def align(*arguments: Any):
        made.append(realigned(*arguments))
        return made[-1]

    def watched(name: str, dense: Contender, pruned: Contender, *args: Any, **how: Any):
        timed.extend([pruned.removed] if name.startswith("widths") else [])
        return compare(name, dense, pruned, *args, **how)

    monkeypatch.setattr(bench_room, "capture_cached", capture)
    monkeypatch.setattr(bench_room, "realigned", align)
    monkeypatch.setattr("dispfx.benchmark.alignments.realigned", align)
    monkeypatch.setattr(bench_room, "compare", watched)
    words: dict[str, Any] = {"eval_data": str(text), "eval_windows": 1} if with_text else {}
    bench(
        pruned_folder, dense=str(decoder_folder), batch=(1,), prompt=(4,), past=(3,), mode="eager",
        align=(1, 8), **words,
    )  # fmt: skip
    assert len(captured) == 2, "the folder's shape and the dense decoder"
    assert len(made) == 1 and timed == 2 * [plan.achieved for plan in made[0]]


def test_a_plan_is_made_again_at_an_alignment_from_what_it_keeps():
    program = plain("llama")
    plan = Plan.random(program, 0.4, seed=0)
    same, coarse = realigned(program, plan, (1, 8))
    assert [s.kept.tolist() for s in same.selections] == [s.kept.tolist() for s in plan.selections]
    assert all(len(s.kept) % 8 == 0 for s in coarse.selections)
    for before, after in zip(plan.selections, coarse.selections, strict=True):
        smaller, larger = sorted((set(before.kept.tolist()), set(after.kept.tolist())), key=len)
        assert smaller <= larger, "features come or go, and none is exchanged"


def test_a_dense_model_of_other_shapes_is_refused(pruned_folder: Path):
    with pytest.raises(PlanMismatchError, match="shapes"):
        bench(pruned_folder, dense=tiny_transformer("llama"), batch=(1,), prompt=(4,), past=(3,))


def test_a_plan_is_not_measured_on_other_weights(pruned_folder: Path, decoder_folder: Path, tmp_path: Path):
    """Speed depends on shapes alone, and perplexity does not."""
    text = tmp_path / "tokens.safetensors"
    save_file({"tokens": torch.randint(61, (300,))}, text)
    other: Any = open_model(ModelSettings(str(decoder_folder))).model
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.mul_(1.5)
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        bench(pruned_folder, dense=other, align=(8,), eval_data=str(text))


def test_a_length_that_the_decoder_cannot_read_is_refused(pruned_folder: Path):
    with pytest.raises(DataError, match="2049 tokens"):
        bench(pruned_folder, prompt=(2049,))
    with pytest.raises(DataError, match="2049 tokens"):
        bench(pruned_folder, past=(2048,))


@pytest.mark.slow
def test_onnx_models_of_both_decoders_are_timed(pruned_folder: Path):
    seen: list[SpeedRow] = []
    benched = bench(pruned_folder, batch=(1,), prompt=(4,), past=(3,), runtime="onnx", on_row=seen.append)
    assert list(benched.rows) == seen and [tuple(row.shape) for row in seen] == [(1, 4, 0), (1, 1, 3)]
    assert all(row.speedup and row.speedup > 0 and row.note == "" for row in seen)


def test_a_folder_with_a_graph_alone_is_refused(compiled: Compiled):
    with pytest.raises(OutputError, match="holds only a graph"):
        bench(compiled.path, batch=(1,), prompt=(4,), past=(3,))
