"""A run for a range of ratios: interrupted, resumed, complete, applied, and refused where it cannot be."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dispfx
from dispfx.api import apply, curve, learn_plan
from dispfx.errors import BudgetError, DataError, DispfxError, OutputError
from dispfx.plan.family import Family
from dispfx.plan.plan import Plan
from tests.api.conftest import MODEL, RATIO, SETTINGS, Watcher
from tests.learning_options import options_of

RANGE = "0.2:0.5"


def learn(out: Path, tokens: Path, ratio: float | str = RANGE, **changes: Any) -> Plan | Family:
    words = {"data": tokens, **options_of(SETTINGS), "align": 1} | changes
    return learn_plan(MODEL, ratio, out=out, **words)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> Path:
    out = tmp_path_factory.mktemp("family") / "family.safetensors"
    learn(out, tokens)
    return out


def test_a_range_gives_a_family_and_leaves_no_state(family: Path):
    found = Family.load(family)
    assert (found.smallest, found.largest) == (0.2, 0.5) and found.plan.made_from
    assert [path.name for path in family.parent.iterdir()] == ["family.safetensors"]


def test_the_same_run_gives_the_same_order(family: Path, tmp_path: Path, tokens: Path):
    learn(tmp_path / "again.safetensors", tokens)
    first, second = (Family.load(path) for path in (family, tmp_path / "again.safetensors"))
    assert all(torch.equal(first.order[name], second.order[name]) for name in first.order)


def test_an_interrupted_run_resumes_to_the_same_family(family: Path, tmp_path: Path, tokens: Path):
    class Impatient(Watcher):
        def learning(self, record) -> None:
            super().learning(record)
            if len(self.steps) == 2:
                raise KeyboardInterrupt

    out = tmp_path / "family.safetensors"
    with pytest.raises(KeyboardInterrupt):
        learn(out, tokens, observer=Impatient())
    with pytest.raises(DataError, match=r"settings: ratio was '0\.2:0\.5' and is '0\.2:0\.6'"):
        learn(out, tokens, "0.2:0.6", resume=True)
    watcher = Watcher()
    learn(out, tokens, resume=True, observer=watcher)
    assert "going on at step 2" in watcher.notes
    first, second = Family.load(family), Family.load(out)
    assert all(torch.equal(first.order[name], second.order[name]) for name in first.order)


def test_a_complete_family_is_returned_and_another_range_is_refused(family: Path, tokens: Path):
    watcher = Watcher()
    found = learn(family, tokens, resume=True, observer=watcher)
    assert isinstance(found, Family) and watcher.notes[-1] == f"{family} is complete; there is nothing to do"
    with pytest.raises(OutputError, match="ratio was"):
        learn(family, tokens, "0.2:0.6", resume=True)
    with pytest.raises(OutputError, match="ratio was"):
        learn(family, tokens, RATIO, resume=True)


@pytest.mark.parametrize("given", [str, Path, Family.load], ids=["text", "path", "family"])
def test_apply_makes_the_decoder_of_one_ratio(family: Path, tmp_path: Path, tokens: Path, given):
    report = apply(MODEL, given(family), tokens, tmp_path / "out", ratio=0.37)
    assert report.ratio.requested == 0.37 and abs(report.ratio.achieved - 0.37) < 0.01
    assert report.verify and all(line.holds for line in report.verify)
    plan = Plan.load(tmp_path / "out" / "plan.safetensors")
    smaller = Family.load(family).at(dispfx.api.inspect(MODEL), 0.5)
    assert all(set(own.tolist()) <= set(plan.kept[name].tolist()) for name, own in smaller.kept.items())


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (None, r"a family has plans for ratios from 0\.2 to 0\.5, and none of them was named"),
        (0.1, r"ratios from 0\.2 to 0\.5, but 0\.1 was asked for"),
    ],
)
def test_a_family_needs_a_ratio_of_its_range(family: Path, tmp_path: Path, ratio, message: str):
    with pytest.raises(BudgetError, match=message):
        apply(MODEL, family, out=tmp_path / "out", ratio=ratio)
    assert not list(tmp_path.iterdir())


def test_a_plan_takes_no_ratio(family: Path, tmp_path: Path):
    Family.load(family).plan.save(tmp_path / "plan.safetensors")
    with pytest.raises(BudgetError, match=r"has no effect: a plan has one ratio, 0\.5"):
        apply(MODEL, tmp_path / "plan.safetensors", out=tmp_path / "out", ratio=0.3)


def test_compile_makes_one_decoder(tmp_path: Path, tokens: Path):
    with pytest.raises(BudgetError, match="a folder holds one decoder, and a range of ratios was given"):
        dispfx.compile(MODEL, RANGE, tokens, tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magnitude"}, "scores features once"),
        ({"ratio_of": "file.py:cost"}, "is a cost of your own"),
    ],
)
def test_what_a_range_cannot_have_is_refused_before_anything_is_opened(
    tmp_path: Path, tokens: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("file.py").write_text("def cost(sizes):\n    return 1.0\n")
    watcher = Watcher()
    with pytest.raises(DispfxError, match="a family for a range of ratios cannot be learned") as error:
        learn(tmp_path / "family.safetensors", tokens, observer=watcher, **change)
    assert message in str(error.value) and not watcher.stages


@pytest.mark.parametrize(
    "text", ["0.5:0.2", "0.1:0.2:0.3", "0.3:", "a:b", "0:0.5", "0.2:1", "20:50", "abc", ""]
)
def test_a_text_that_is_no_range_is_refused_with_an_example(tmp_path: Path, tokens: Path, text: str):
    with pytest.raises(BudgetError, match="`ratio` must be a share") as error:
        learn(tmp_path / "family.safetensors", tokens, text)
    assert "0.2" in str(error.value.hint) or "0.1:0.6" in str(error.value.hint)


def test_a_curve_measures_every_point_and_finds_the_smallest_within(family: Path, tokens: Path):
    found = curve(MODEL, family, eval_data=tokens, points=3, eval_windows=2)
    assert [point.ratio for point in found.points] == [0.2, 0.35, 0.5]
    sizes = [point.parameters for point in found.points]
    assert found.dense_parameters > sizes[0] > sizes[1] > sizes[2] and found.within is None
    limit = (found.points[0].kl + found.points[-1].kl) / 2
    within = curve(MODEL, family, eval_data=tokens, points=2, eval_windows=2, within=limit).within
    assert within is not None and within.kl <= limit and 0.2 <= within.ratio <= 0.5
    with pytest.raises(BudgetError, match="no decoder of the family is within 1e-12 nats"):
        curve(MODEL, family, eval_data=tokens, points=2, eval_windows=1, within=1e-12)


def test_a_curve_needs_a_text(family: Path):
    with pytest.raises(DataError, match="text to measure on is needed"):
        curve(MODEL, family)


def test_a_curve_writes_its_page_from_python_too(family: Path, tokens: Path, tmp_path: Path):
    given = {"eval_data": tokens, "points": 2, "eval_windows": 1, "out": tmp_path / "curve.html"}
    curve(MODEL, family, **given)
    assert (tmp_path / "curve.html").is_file() and (tmp_path / "curve.png").is_file()
    with pytest.raises(OutputError, match="must not exist yet"):
        curve(MODEL, family, **given)


def test_one_plan_takes_one_ratio():
    with pytest.raises(BudgetError, match=r"a plan has one ratio, and '0\.1:0\.6' was given") as error:
        dispfx.learn(dispfx.api.inspect(MODEL), torch.arange(400) % 61, "0.1:0.6")  # type: ignore[arg-type]
    assert "learn_family" in str(error.value.hint)


def test_a_family_that_misses_its_ratio_says_so(family: Path, tmp_path: Path, tokens: Path):
    coarse = tmp_path / "coarse.safetensors"
    learn(coarse, tokens, align=16)
    watcher = Watcher()
    report = apply(MODEL, coarse, tokens, tmp_path / "out", ratio=0.33, observer=watcher)
    missed = abs(report.ratio.achieved - 0.33) > 0.005
    assert missed == any("are removed, not 33.0%" in note for note in watcher.notes)
