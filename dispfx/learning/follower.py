"""A rank that computes with the one that leads: masks come in, gradients go out.

What the leading rank does with the decoder in `dispfx.learning.trainer`, this one does at the same time and
in the same order, since a decoder may lie in parts on all ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.learning.ahead import Ahead
from dispfx.learning.learner import Problem, backward_decoder, check_gates, check_samples
from dispfx.learning.scores import starting_logits

HELD_OUT_BATCHES = 8
# The step that a run starts at which resumes nothing.
NEW_RUN = -1


def follow(problem: Problem) -> None:
    """Compute every step of the run with the leading rank, until it says that there are no more.

    Raises:
        PassError, DispfxError: if a gate does not act on this rank.
        RankLost: if another rank ended.
    """
    begin = receive_start(problem)
    settings = problem.settings
    if begin.step < settings.steps:
        check_gates(problem)
        check_samples(problem)
    if begin.is_new and settings.start == "sensitivity":
        starting_logits(problem)
    batches = Ahead(problem.batch, problem.device)
    shape = (
        (problem.groups.features,) if settings.samples == 1 else (settings.samples, problem.groups.features)
    )
    for step in range(begin.step, settings.steps):
        masks = problem.ranks.send(torch.empty(shape, device=problem.device))
        if says_stop(masks):
            return
        masks.requires_grad_()
        loss = backward_decoder(problem, batches, masks, step)
        assert masks.grad is not None
        problem.ranks.average(masks.grad)
        problem.ranks.average(loss)
        if settings.held_out_every and (step + 1) % settings.held_out_every == 0:
            held_out_loss(problem, torch.empty(problem.features, device=problem.device))


@dataclass(frozen=True)
class Start:
    """Where a run begins: its first step, and whether it resumes nothing."""

    step: int
    is_new: bool


def send_start(problem: Problem, start: Start) -> None:
    """Tell the other ranks where the run begins."""
    number = NEW_RUN if start.is_new else start.step
    problem.ranks.send(torch.tensor(number, device=problem.device))


def receive_start(problem: Problem) -> Start:
    """Return where the leading rank says that the run begins."""
    number = int(problem.ranks.send(torch.tensor(0, device=problem.device)))
    return Start(max(number, 0), number == NEW_RUN)


def send_stop(problem: Problem) -> None:
    """Tell the other ranks that there are no further steps: no mask holds a NaN, so one says so."""
    samples = problem.settings.samples
    shape = (problem.groups.features,) if samples == 1 else (samples, problem.groups.features)
    problem.ranks.send(torch.full(shape, torch.nan, device=problem.device))


def says_stop(masks: Tensor) -> bool:
    """Whether masks say that there are no further steps."""
    return bool(masks.flatten()[0].isnan())


@torch.no_grad()
def held_out_loss(problem: Problem, masks_N: Tensor) -> float | None:
    """Return the loss on the start of the held-out text under the masks of the leading rank."""
    batches = problem.text.held_out_batches(HELD_OUT_BATCHES)
    if not batches:
        return None
    problem.ranks.send(masks_N)
    losses = [problem.loss(ids_BT, masks_N) for ids_BT in batches]
    return float(torch.stack(losses).mean())
