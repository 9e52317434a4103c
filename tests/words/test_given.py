"""An argument of another kind than a function takes: the error says what was given and what is wanted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dispfx
from dispfx import api
from dispfx.errors import DispfxError
from dispfx.plan.plan import Plan
from tests.plain_decoders import FORMS, build

MODEL: Any = build(FORMS["pre-norm"], layers=1)
PROGRAM: Any = dispfx.capture(MODEL)
PLAN: Any = Plan.random(PROGRAM, 0.3, 0)
NONE: Any = None
THREE: Any = 3
FILE: Any = "plan.safetensors"


@pytest.mark.parametrize(
    ("call", "wanted", "given"),
    [
        (lambda: dispfx.lower(PROGRAM, NONE), "a Plan", "None"),
        (lambda: dispfx.lower(PROGRAM, FILE), "a Plan", "'plan.safetensors'"),
        (lambda: dispfx.lower(PLAN, PROGRAM), "a Program", "a Plan"),
        (lambda: dispfx.lower(MODEL, PLAN), "a Program", "a Decoder"),
        (lambda: dispfx.gated(PROGRAM, NONE), "a Plan", "None"),
        (lambda: dispfx.gated(MODEL, PLAN), "a Program", "a Decoder"),
        (lambda: dispfx.gate(MODEL), "a Program", "a Decoder"),
        (lambda: dispfx.learn(MODEL, torch.zeros(9000), 0.3), "a Program", "a Decoder"),
        (lambda: Plan.random(MODEL, 0.3, 0), "a Program", "a Decoder"),
        (lambda: Plan.from_masks(MODEL, {}), "a Program", "a Decoder"),
        (lambda: Plan.from_scores(MODEL, {}, 0.3), "a Program", "a Decoder"),
        (lambda: dispfx.load(NONE), "path of a folder", "None"),
        (lambda: dispfx.load(THREE), "path of a folder", "3"),
        (lambda: api.verify(NONE), "path of a folder", "None"),
        (lambda: Plan.load(NONE), "path of a plan", "None"),
        (lambda: PLAN.save(THREE), "path of the plan", "3"),
        (lambda: api.inspect(NONE), "a decoder", "None"),
        (lambda: api.export(THREE), "a decoder", "3"),
        (lambda: dispfx.compile(PROGRAM, 0.3, "text.txt", "DIR"), "a decoder", "a Program"),
        (lambda: dispfx.compile(MODEL, 0.3, "text.txt", THREE), "path of the output", "3"),
    ],
)
def test_another_kind_of_argument_is_named(call: Callable[[], Any], wanted: str, given: str):
    with pytest.raises(DispfxError) as caught:
        call()
    assert f"{wanted} " in f"{caught.value.problem} " and f"but {given} was given" in caught.value.problem


def test_a_plan_is_read_from_a_path_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    PLAN.save("~/plan.safetensors")
    assert Plan.load("~/plan.safetensors") == PLAN == Plan.load(tmp_path / "plan.safetensors")


@pytest.mark.parametrize("call", [dispfx.load, api.verify, Plan.load, PLAN.save, api.bench, api.evaluate])
def test_an_empty_path_is_not_the_current_folder(call: Callable[[str], Any], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DispfxError, match=r"an empty one was given|must not be empty"):
        call("")
    assert not list(tmp_path.iterdir())
