"""Training towards a dense decoder: it falls, it stops, it keeps the best, and it goes on where it was."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dispfx.errors import DataError, DispfxError, PlanMismatchError
from dispfx.learning.distillation import (
    Keeping,
    RecoveryStep,
    Student,
    held_out_divergence,
    learning_rate,
    recover,
)
from dispfx.learning.divergence import Predictions, kl_divergence, stream_distance
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.settings.recovery_settings import RecoverySettings
from tests.learning.students import SETTINGS, hurt, recovery_task, weights
from tests.learning.tiny_decoder import untrained_decoder


def stopping(*steps: int) -> Any:
    """Interrupt a run when a step is told."""
    at = list(steps)

    def on_step(step: RecoveryStep) -> None:
        if at and step.step == at[0]:
            at.pop(0)
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def test_kl_falls_and_the_student_has_the_weights_of_the_best_measurement(tmp_path: Path):
    task = recovery_task(steps=40, measure_every=10)
    found = recover(task, Keeping(tmp_path))
    assert [one.step for one in found.held_out] == [0, 10, 20, 30, 40]
    assert found.best.kl < 0.5 * found.held_out[0].kl
    assert held_out_divergence(task) == pytest.approx(found.best.kl, rel=1e-6)
    assert [step.step for step in found.steps] == list(range(1, 41))
    assert found.steps[-1].loss < found.steps[0].loss


def test_a_step_follows_kl_and_the_distance_of_the_streams_and_tells_kl_alone(tmp_path: Path):
    dense = untrained_decoder()

    def steps_of(weight: float, folder: str) -> tuple[float, dict[str, Tensor]]:
        learner = hurt(dense)
        task = recovery_task(learner, dense, steps=1, stream_weight=weight)
        streams = [
            lambda ids_BT, one=one: Predictions(logits := one.dense(ids_BT), stream=(logits,))
            for one in (learner, dense)
        ]
        task = replace(task, student=replace(task.student, predictions=streams[0]), teacher=streams[1])
        ids = task.text.batch(0)
        found = streams[0](ids), streams[1](ids)
        loss = kl_divergence(found[1], found[0])
        if weight:
            loss = loss + weight * stream_distance(found[1], found[0])
        slopes = torch.autograd.grad(loss, list(task.student.trained.values()))
        step = recover(task, Keeping(tmp_path / folder)).steps[0]
        state = load_file(tmp_path / folder / STATE_FILE)
        norm = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt().clamp_min(1.0)
        for name, slope in zip(task.student.trained, slopes, strict=True):
            # AdamW's first moment after one step: a tenth of the clipped gradient.
            torch.testing.assert_close(state[f"optimizer.exp_avg.{name}"], 0.1 * slope / norm)
        return step.loss, state

    alone, both = steps_of(0.0, "alone"), steps_of(2.0, "both")
    assert alone[0] == both[0], "what is told is KL"
    name = "optimizer.exp_avg.up.0.weight"
    assert not torch.allclose(alone[1][name], both[1][name])


def test_held_out_kl_is_the_mean_over_all_its_tokens():
    task = recovery_task(batch_size=4)
    ids = torch.cat(list(task.held_out))
    assert len(ids) == 6, "no multiple of the batch"
    expected = kl_divergence(task.teacher(ids), task.student.predictions(ids))
    assert held_out_divergence(task) == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_that_gets_worse_stops_and_gives_the_first_weights_back(tmp_path: Path):
    task = recovery_task(lr=1.0, steps=50, measure_every=2, patience=3)
    before = weights(task)
    found = recover(task, Keeping(tmp_path))
    assert len(found.steps) == 6 and found.best.step == 0
    assert all(torch.equal(one, before[name]) for name, one in task.student.trained.items())


def test_the_learning_rate_rises_and_falls_to_zero():
    settings = RecoverySettings(steps=100, lr=2.0)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.4) and max(rates) == pytest.approx(2.0, rel=1e-2)
    assert rates.index(max(rates)) == 4 and rates[-1] < 1e-3


def test_weights_of_half_precision_learn_in_float32(tmp_path: Path):
    dense = untrained_decoder()
    learner = hurt(dense).to(torch.bfloat16)
    task = recovery_task(learner, dense, lr=1e-4, steps=40, measure_every=20)
    before, found = weights(task), recover(task, Keeping(tmp_path))
    assert found.best.kl < found.held_out[0].kl
    state = load_file(tmp_path / STATE_FILE)
    name = "up.0.weight"
    assert state[f"weight.{name}"].dtype == torch.float32 != task.student.trained[name].dtype
    # A step of 1e-4 is lost on most bfloat16 weights, and forty of them are not.
    assert not torch.equal(task.student.trained[name], before[name])


def test_a_run_that_was_stopped_twice_goes_on_to_the_same_bits(tmp_path: Path):
    whole = recovery_task()
    expected = recover(whole, Keeping(tmp_path / "whole"))
    folder = tmp_path / "cut"
    for stop in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            recover(recovery_task(), Keeping(folder, True, stopping(stop)))
        assert saved_step(folder) == stop
    task = recovery_task(save_every=1)
    found = recover(task, Keeping(folder, True))
    assert (found.steps, found.held_out) == (expected.steps, expected.held_out)
    for name, one in task.student.trained.items():
        assert torch.equal(one, whole.student.trained[name]), name
    ours, theirs = (load_file(place / STATE_FILE) for place in (folder, tmp_path / "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(one, theirs[name]) for name, one in ours.items())


def test_a_state_of_another_decoder_or_other_settings_is_refused(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        recover(recovery_task(), Keeping(tmp_path, on_step=stopping(1)))
    with pytest.raises(PlanMismatchError, match="another decoder"):
        recover(replace(recovery_task(), decoder="other"), Keeping(tmp_path, True))
    with pytest.raises(DataError, match="patience was 5 and is 6"):
        recover(recovery_task(patience=6), Keeping(tmp_path, True))


def put(name: str, tensor: Tensor) -> Any:
    return lambda tensors: tensors.update({name: tensor})


def cast(name: str, dtype: torch.dtype) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def fill(name: str, value: float) -> Any:
    return lambda tensors: tensors[name].fill_(value)


def without_moments_of_one(tensors: dict[str, Tensor]) -> None:
    for key in ("step", "exp_avg", "exp_avg_sq"):
        del tensors[f"optimizer.{key}.up.0.weight"]


def without_moments(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda tensors: tensors.pop("losses"), "losses is not there"),
        (lambda tensors: tensors.pop("held_out"), "held_out is not there"),
        (lambda tensors: tensors.pop("best.up.0.weight"), "best.up.0.weight is not there"),
        (
            lambda tensors: tensors.pop("optimizer.step.up.0.weight"),
            "step.up.0.weight is not there",
        ),
        (without_moments_of_one, "the optimizer has no state of up.0.weight, which was trained"),
        (without_moments, "the optimizer has no state after step 3"),
        (put("more", torch.ones(2)), r"more is float32 \[2\], but this run has no such tensor"),
        (put("losses", torch.zeros(2, dtype=torch.float64)), r"losses is float64 \[2\], .* float64 \[3\]"),
        (put("held_out", torch.zeros(0)), r"held_out is float32 \[0\]"),
        (put("held_out", torch.tensor([[100.0, 1.0]], dtype=torch.float64)), r"steps \[100\], .* at \[0\]"),
        (put("held_out", torch.tensor([[0.0, math.nan]], dtype=torch.float64)), "first KL .* not finite"),
        (put("weight.up.0.weight", torch.zeros(3)), r"weight.up.0.weight is float32 \[3\]"),
        (put("best.up.0.weight", torch.zeros(3)), r"best.up.0.weight is float32 \[3\]"),
        (cast("best.up.0.weight", torch.int32), "best.up.0.weight is int32"),
        (cast("optimizer.exp_avg_sq.up.0.weight", torch.int32), "exp_avg_sq.up.0.weight is int32"),
        (put("optimizer.exp_avg.up.0.weight", torch.zeros(3)), r"exp_avg.up.0.weight is float32 \[3\]"),
        (put("optimizer.step.up.0.weight", torch.ones(2, 2)), r"step.up.0.weight is float32 \[2, 2\]"),
        (put("optimizer.step.up.0.weight", torch.tensor(99.0)), "99 steps of up.0.weight, but the run 3"),
        (put("optimizer.step.up.0.weight", torch.tensor(1.5)), "1.5 steps of up.0.weight"),
        (fill("best.up.0.weight", math.nan), "best.up.0.weight has values that are not finite"),
        (fill("weight.up.0.weight", math.inf), "weight.up.0.weight has values that are not finite"),
        (fill("optimizer.exp_avg_sq.up.0.weight", -1.0), "squared gradients of up.0.weight is negative"),
    ],
)
def test_a_damaged_state_is_refused(damage: Any, said: str, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        recover(recovery_task(), Keeping(tmp_path, on_step=stopping(3)))
    file = tmp_path / STATE_FILE
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata=header)
    task = recovery_task()
    before, told = weights(task), []
    with pytest.raises(DataError, match=f"(?s)the state to resume from is damaged: .*{said}"):
        recover(task, Keeping(tmp_path, True, told.append))
    assert not told and all(torch.equal(one, before[name]) for name, one in task.student.trained.items())


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_run_that_was_stopped_while_it_measured_goes_on(tmp_path: Path, call: int):
    expected = recover(recovery_task(), Keeping(tmp_path / "whole"))
    task, calls = recovery_task(), []

    def interrupted(ids_BT: Tensor) -> Predictions:
        if not torch.is_grad_enabled():
            calls.append(ids_BT)
            if len(calls) == call * 2 + 1:
                raise KeyboardInterrupt
        return task.student.predictions(ids_BT)

    stopped = replace(task, student=replace(task.student, predictions=interrupted))
    with pytest.raises(KeyboardInterrupt):
        recover(stopped, Keeping(tmp_path / "cut"))
    assert saved_step(tmp_path / "cut") == 3 * call
    found = recover(recovery_task(), Keeping(tmp_path / "cut", True))
    assert (found.steps, found.held_out) == (expected.steps, expected.held_out)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path):
    task = recovery_task()
    calls = 0

    def spoiled(ids_BT: Tensor) -> Predictions:
        nonlocal calls
        calls += 1
        found = task.student.predictions(ids_BT)
        return Predictions(found.x_BTD * (math.nan if calls > 4 else 1.0))

    broken = replace(task, student=Student(spoiled, task.student.trained))
    with pytest.raises(DispfxError, match=r"the loss of step 3 is nan, and nothing was written"):
        recover(broken, Keeping(tmp_path))


def test_what_no_gradient_reaches_stays_as_it_is(tmp_path: Path):
    task = recovery_task()
    idle = nn.Parameter(torch.ones(3))
    with_idle = replace(
        task, student=Student(task.student.predictions, {**task.student.trained, "idle": idle})
    )
    with pytest.raises(KeyboardInterrupt):
        recover(with_idle, Keeping(tmp_path, on_step=stopping(2)))
    recover(with_idle, Keeping(tmp_path, True))
    assert idle.tolist() == [1.0, 1.0, 1.0]


def test_settings_that_make_no_run_are_refused_and_what_is_open_follows_the_kind():
    for wrong in ({"steps": 0}, {"seq_len": 1}, {"lr": 0.0}, {"rank": 0}, {"patience": 0}, {"train": "all"}):
        with pytest.raises(DispfxError, match=next(iter(wrong))):
            replace(SETTINGS, **wrong)  # type: ignore[arg-type]
    fitted = RecoverySettings(train="scales").fitted(256)
    assert (fitted.steps, fitted.lr, fitted.seq_len, fitted.measure_every) == (600, 1e-2, 256, 30)
    assert RecoverySettings().fitted(4096).seq_len == 512
    assert RecoverySettings(seq_len=4096, steps=7).fitted(64).seq_len == 4096
