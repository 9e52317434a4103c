"""--dry-run: what a compile would do, found without doing it."""

from pathlib import Path
from typing import Any

import pytest

from dispfx.api import RunSettings, preview
from dispfx.errors import BudgetError, DataError, OutputError
from dispfx.report.run_preview import preview_lines, preview_plain
from tests.api.conftest import MODEL, RATIO, SETTINGS, Compiled, Watcher
from tests.learning_options import options_of


def run_of(**others: Any) -> RunSettings:
    return RunSettings.of(**{"model": MODEL, "ratio": RATIO, **options_of(SETTINGS), **others})


def test_a_preview_writes_nothing_and_tells_what_the_compile_did(
    compiled: Compiled, tokens: Path, tmp_path: Path
):
    watcher = Watcher()
    found = preview(run_of(out=tmp_path / "out", data=tokens, align=1), watcher)
    assert list(tmp_path.iterdir()) == []
    report = compiled.report
    assert found.parameters == report.parameters.dense
    assert found.parameters_left == pytest.approx(report.parameters.pruned, rel=0.05)
    assert found.reachable == pytest.approx(RATIO, abs=0.02)
    assert found.out == tmp_path / "out" and found.state == tmp_path / "out.state"
    assert found.cpu_seconds is not None and found.cpu_seconds > 0 and found.resumes_at is None
    assert found.tokens > 0 and found.tokens_measured > 0
    assert watcher.steps == [] and watcher.stages == ["open", "capture", "check lengths", "rehearse"]


def test_a_ratio_out_of_reach_a_missing_text_and_an_unfinished_run_are_refused_as_by_compile(
    compiled: Compiled, tokens: Path, tmp_path: Path
):
    with pytest.raises(BudgetError, match="can remove at most"):
        preview(run_of(ratio=0.999, out=tmp_path / "out", data=tokens))
    with pytest.raises(DataError, match="text to learn from"):
        preview(run_of(out=tmp_path / "out"))
    with pytest.raises(OutputError, match="must not exist"):
        preview(run_of(out=compiled.path, data=tokens))
    (tmp_path / "out.state").mkdir()
    (tmp_path / "out.state" / "metrics.jsonl").touch()
    with pytest.raises(OutputError, match="unfinished"):
        preview(run_of(out=tmp_path / "out", data=tokens))


def test_people_and_programs_are_told_the_same(tokens: Path, tmp_path: Path):
    found = preview(run_of(out=tmp_path / "out", data=tokens, align=1))
    plain, lines = preview_plain(found), preview_lines(found, "a plan")
    assert plain["dry_run"] is True and plain["ratio"]["requested"] == RATIO
    assert plain["parameters"] == {"dense": found.parameters, "pruned": found.parameters_left}
    assert f"{found.parameters_left:,}" in lines[1] and "nothing was written" in lines[-1]
    assert str(tmp_path / "out.state") in lines[-2] and "a plan" in lines[-2]
