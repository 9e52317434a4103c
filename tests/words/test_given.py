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
IDS = torch.arange(600) % 32


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
        (lambda: dispfx.capture(MODEL, sites=THREE), "a list of names", "3"),
        (lambda: dispfx.capture(MODEL, skip=NONE), "a list of names", "None"),
        (lambda: dispfx.capture(MODEL, sites=[THREE]), "a list of names", "a list"),
        (lambda: dispfx.capture(MODEL, passes=THREE), "a list of passes", "3"),
        (lambda: dispfx.lower(PROGRAM, PLAN, passes=NONE), "a list of passes", "None"),
        (lambda: dispfx.capture(MODEL, vocabulary_size=FILE), "a whole number of 1 or more", repr(FILE)),
        (lambda: dispfx.capture(MODEL, vocabulary_size=0), "a whole number of 1 or more", "0"),
        (lambda: api.capture_cached(MODEL, vocabulary_size=FILE), "a whole number of 1 or more", repr(FILE)),
        (lambda: api.analyse(MODEL, longest=NONE), "a whole number of 0 or more", "None"),
        (lambda: api.analyse(MODEL, separator=FILE), "a whole number of 0 or more", repr(FILE)),
        (lambda: api.lower_cached(MODEL, NONE), "a Plan", "None"),
        (lambda: api.separate_documents(MODEL, NONE, 1), "a Program", "None"),
        (lambda: api.coverage(MODEL), "a Program", "a Decoder"),
        (lambda: api.estimate(MODEL), "a Program", "a Decoder"),
        (lambda: api.estimate(PROGRAM, THREE), "a LearnSettings", "3"),
        (lambda: api.estimate(PROGRAM, device=THREE), "a device", "3"),
        (lambda: api.settings_of(PROGRAM, NONE), "a LearnSettings", "None"),
        (lambda: api.settings_of(MODEL, NONE), "a Program", "a Decoder"),
        (lambda: dispfx.learn(PROGRAM, IDS, 0.3, settings=THREE), "a LearnSettings", "3"),
        (lambda: dispfx.learn(PROGRAM, IDS, 0.3, compute=THREE), "a ComputeSettings", "3"),
        (lambda: dispfx.learn(PROGRAM, IDS, 0.3, watch=THREE), "a Watch", "3"),
        (lambda: dispfx.learn(PROGRAM, IDS, 0.3, ranks=THREE), "a Ranks", "3"),
        (lambda: dispfx.compile(MODEL, 0.3, IDS, "DIR", settings=THREE), "a RunSettings", "3"),
        (lambda: dispfx.compile(MODEL, 0.3, IDS, "DIR", observer=THREE), "an observer with the", "3"),
        (lambda: api.run_compile(THREE), "a RunSettings", "3"),
        (lambda: api.run_learn(THREE), "a RunSettings", "3"),
        (lambda: api.run_apply(THREE), "an ApplySettings", "3"),
        (lambda: api.run_recover(THREE), "a RecoverSettings", "3"),
        (lambda: api.preview(THREE), "a RunSettings", "3"),
        (lambda: api.generate("demo", THREE), "a text", "3"),
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
