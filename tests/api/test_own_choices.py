"""Runs with a score or an estimator from a user's own file, and runs that start from a plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dispfx
from dispfx.errors import DataError, DispfxError, PlanMismatchError
from dispfx.learning.scores import Scored
from dispfx.learning.trainer import Watch
from dispfx.settings import LearnSettings, RunSettings
from tests.command_line import run
from tests.learning.problems import problem_of
from tests.programs import program_of, token_ids
from tests.trust.runs import write_tokens

MINE = """
import torch

def score(scored):
    return scored.weight_norms()

def draw(logits, temperature, generator):
    soft = (logits / temperature).sigmoid()
    hard = (torch.rand(logits.shape, generator=generator) < logits.sigmoid()).to(logits.dtype)
    return hard + soft - soft.detach()
"""
SMALL: dict[str, Any] = {"steps": 2, "seq_len": 8, "batch_size": 2, "recipe": "paper"}


def small(steps: int) -> dict[str, Any]:
    return {**SMALL, "steps": steps}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)


@pytest.fixture(scope="module")
def program() -> dispfx.Program:
    return program_of("pre-norm", layers=1)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return token_ids(1, 400)[0]


def test_names_of_the_field_and_their_aliases_are_one_method():
    for old, new in {"activation": "wanda", "fluctuation": "flap", "sensitivity": "fisher"}.items():
        assert LearnSettings(method=old).method == new  # type: ignore[arg-type]
    assert (
        RunSettings.of(model="demo", ratio=0.3, method="activation").plain()["learning"]["method"] == "wanda"
    )
    with pytest.raises(DispfxError, match="did you mean wanda"):
        LearnSettings(method="wnada")  # type: ignore[arg-type]


def test_a_score_is_a_file_or_a_function(program: dispfx.Program, ids: Tensor):
    def score(scored: Scored) -> dict[str, Tensor]:
        return scored.weight_norms()

    plans = [dispfx.learn(program, ids, 0.3, method=method, **SMALL) for method in ("mine.py:score", score)]
    expected = dispfx.Plan.from_scores(program, Scored(*problem_of(program), 1).weight_norms(), 0.3)
    assert plans[0] == plans[1] and plans[0].kept.keys() == expected.kept.keys()
    assert all(torch.equal(plans[0].kept[name], kept) for name, kept in expected.kept.items())


def test_an_estimator_from_a_file_learns_what_the_same_one_of_dispfx_learns(
    program: dispfx.Program, ids: Tensor
):
    ours, same = (
        dispfx.learn(program, ids, 0.3, estimator=name, lr=0.1, **small(6))
        for name in ("mine.py:draw", "straight-through")
    )
    assert ours == same != dispfx.Plan.random(program, 0.3, 0)


def test_a_run_is_not_resumed_with_another_function_of_the_same_name(
    program: dispfx.Program, ids: Tensor, tmp_path: Path
):
    def learned(steps: int) -> dispfx.Plan:
        watch = Watch(tmp_path / "state", resume=True)
        return dispfx.learn(program, ids, 0.3, estimator="mine.py:draw", watch=watch, **small(steps))

    learned(2)
    learned(3)
    Path("mine.py").write_text(MINE.replace("generator=generator)", "generator=generator) * 0.9"))
    with pytest.raises(DataError, match=r"estimator was 'mine.py:draw \(.*' and is 'mine.py:draw \("):
        learned(4)


def test_the_command_line_takes_functions_of_files_and_names_their_faults(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens.safetensors")
    words = ["learn", "tests.api.plain:build_decoder", "--ratio", "0.3", "--data", tokens, "--align", "1"]
    words += ["--steps", "2", "--batch-size", "2", "--seq-len", "16", "--quiet"]
    found = run(*words, "--method", "mine.py:score", "--out", "scored.safetensors")
    assert found.exit_code == 0, found.output
    found = run(*words, "--estimator", "mine.py:draw", "--out", "drawn.safetensors")
    assert found.exit_code == 0, found.output
    assert dispfx.Plan.load("scored.safetensors") != dispfx.Plan.load("drawn.safetensors")
    found = run(*words, "--method", "mine.py:scores", "--out", "none.safetensors")
    assert found.exit_code == 2 and "did you mean score?" in found.stderr


def test_learning_starts_from_a_plan_and_stays_near_it(program: dispfx.Program, ids: Tensor, tmp_path: Path):
    plan = dispfx.Plan.random(program, 0.3, seed=4)
    learned = dispfx.learn(program, ids, 0.3, start=plan, lr=1e-6, **SMALL)
    assert all(torch.equal(learned.kept[name], kept) for name, kept in plan.kept.items())
    with pytest.raises(PlanMismatchError, match="made for a decoder"):
        dispfx.learn(program, ids, 0.3, start=dispfx.Plan.random(program_of("pre-norm"), 0.3, 0), **SMALL)
    with pytest.raises(DispfxError, match="cannot start from a plan"):
        dispfx.learn(program, ids, 0.3, start=plan, method="wanda", **SMALL)


def test_a_run_that_started_from_a_plan_is_resumed_with_that_plan_alone(
    program: dispfx.Program, ids: Tensor, tmp_path: Path
):
    def learned(state: str, seed: int, steps: int) -> dispfx.Plan:
        watch, start = Watch(tmp_path / state, resume=True), dispfx.Plan.random(program, 0.3, seed)
        return dispfx.learn(program, ids, 0.3, start=start, watch=watch, lr=0.1, **small(steps))

    learned("interrupted", 4, 2)
    assert learned("interrupted", 4, 4) == learned("whole", 4, 4)
    with pytest.raises(DataError, match=r"start was 'plan \("):
        learned("whole", 5, 5)


def test_scoring_tells_how_many_sequences_are_done(program: dispfx.Program, ids: Tensor):
    for method, start in (("fisher", "uniform"), ("wanda", "uniform"), ("learned", "sensitivity")):
        told: list[tuple[int, int]] = []
        watch = Watch(on_score=lambda done, total: told.append((done, total)))  # noqa: B023
        dispfx.learn(program, ids, 0.3, watch=watch, **SMALL, method=method, start=start)
        assert len(told) > 1 and told[-1][0] == told[-1][1]
        assert [done for done, _ in told] == sorted({done for done, _ in told}), method
