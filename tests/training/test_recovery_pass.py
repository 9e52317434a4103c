"""Recovery computes a step in a faster way only where that gives the loss and gradients of the plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dispfx
from dispfx.compiler.pipelines import for_recovery
from dispfx.compiler.programs import lower_program
from dispfx.fast_decoder.recovery_pass import (
    Trial,
    fastest_pass,
    is_compilable,
    with_compiled_graphs,
    with_compiled_losses,
)
from dispfx.learning.distillation import RecoveryPass
from dispfx.run.students import graph_predictions
from dispfx.run.trainables import graph_trainable
from dispfx.settings.recovery_settings import RecoverySettings
from tests.learning.students import recovery_task
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids

IDS = token_ids(2, 24)


def plain_pass(train: Any) -> RecoveryPass:
    """Return the pass of a decoder from which a third was cut."""
    program = dispfx.capture(build(FORMS["pre-norm"], layers=2))
    plan = dispfx.Plan.random(program, 0.3, 0)
    settings = RecoverySettings(train=train, steps=10).fitted(24)
    teacher = for_recovery(program.clone(), 24)
    teacher.graph_module.requires_grad_(False)
    made = graph_trainable(lower_program(program, plan), plan, settings)
    return RecoveryPass(
        graph_predictions(teacher, with_stream=bool(settings.stream_weight)),
        made.student.predictions,
        tuple(made.student.trained.values()),
        settings.stream_weight,
    )


@pytest.mark.parametrize("train", ["weights", "scales"])
@pytest.mark.parametrize("faster", [with_compiled_losses, with_compiled_graphs], ids=lambda one: one.__name__)
def test_a_compiled_pass_has_the_loss_and_gradients_of_the_plain_one(
    train: str, faster: Callable[[RecoveryPass], RecoveryPass]
):
    plain = plain_pass(train)
    assert is_compilable(plain)
    kl, gradients = plain(IDS)
    assert kl > 0.0
    assert any(one is not None and one.count_nonzero() for one in gradients)
    notes: list[str] = []
    trial = Trial(IDS, (kl, gradients), torch.float32, notes.append)
    quick = faster(plain)
    assert trial.better("compiling", lambda: quick, plain) is quick, notes
    assert "recovery by compiling; difference to the plain pass: loss" in notes[0]


@pytest.mark.parametrize("wrong", ["loss", "one gradient", "no gradient"])
def test_a_pass_that_differs_is_not_taken(wrong: str):
    plain = plain_pass("weights")
    notes: list[str] = []

    def broken(ids_BT: Tensor) -> tuple[Tensor, Any]:
        kl, gradients = plain(ids_BT)
        sizes = [0.0 if one is None else one.norm().item() for one in gradients]
        largest = sizes.index(max(sizes))
        changed: Tensor | None = gradients[largest]
        assert changed is not None
        changed = {"one gradient": -changed, "no gradient": None}.get(wrong, changed)
        every = (*gradients[:largest], changed, *gradients[largest + 1 :])
        return kl * (1.01 if wrong == "loss" else 1.0), every

    trial = Trial(IDS, plain(IDS), torch.float32, notes.append)
    assert trial.better("magic", lambda: broken, plain) is plain
    assert notes[0].startswith("recovery does without magic, which differs from the plain pass")


def test_a_way_that_fails_is_left_out_with_the_reason():
    plain, notes = plain_pass("weights"), []

    def fails() -> Any:
        raise RuntimeError("no such kernel\nmore")

    trial = Trial(IDS, plain(IDS), torch.float32, notes.append)
    assert trial.better("magic", fails, plain) is plain
    assert notes == ["recovery does without magic: RuntimeError: no such kernel"]


def test_on_a_cpu_the_pass_is_the_plain_one():
    found = fastest_pass(recovery_task(), torch.float32)
    assert isinstance(found, RecoveryPass)
    assert not is_compilable(found), "a module's predictions are compiled by nobody"
