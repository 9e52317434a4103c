"""A decoder to recover: a tiny one that was cut, beside itself as it was."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.learning.distillation import RecoveryTask, Student
from dispfx.learning.divergence import Predictions
from dispfx.learning.text import TokenBatches
from dispfx.settings.recovery_settings import RecoverySettings
from tests.learning.tiny_decoder import TOKENS, TinyDecoder, markov_tokens, untrained_decoder

SETTINGS = RecoverySettings(steps=8, lr=3e-3, seq_len=TOKENS, measure_every=3, batch_size=4, save_every=3)


def hurt(decoder: TinyDecoder) -> TinyDecoder:
    """Return a copy of a decoder without half of the inner features of its layers."""
    twin = TinyDecoder()
    twin.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        for up in twin.up:
            up.weight[::2] = 0.0  # type: ignore[index]
    return twin


def predicting(decoder: TinyDecoder) -> Any:
    """Return ids → predictions of a decoder."""
    return lambda ids_BT: Predictions(decoder.dense(ids_BT))


def recovery_task(
    student: TinyDecoder | None = None,
    teacher: TinyDecoder | None = None,
    ranks: Ranks = ALONE,
    **changes: Any,
) -> RecoveryTask:
    """Return what a decoder learns from the one it was cut from; `changes` are settings."""
    dense = teacher or untrained_decoder()
    learner = student or hurt(dense)
    settings = replace(SETTINGS, **changes)
    text = TokenBatches.split(
        markov_tokens(2_000), seq_len=TOKENS, batch_size=settings.batch_size, seed=settings.seed
    )
    return RecoveryTask(
        student=Student(predicting(learner), dict(learner.named_parameters())),
        teacher=predicting(dense),
        decoder="tiny",
        text=text,
        held_out=text.held_out_batches(6),
        settings=settings,
        device=torch.device("cpu"),
        ranks=ranks,
    )


def weights(task: RecoveryTask) -> dict[str, Tensor]:
    """Return a copy of what is trained."""
    return {name: one.detach().clone() for name, one in task.student.trained.items()}
