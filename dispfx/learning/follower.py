"""A rank that follows the leader: it receives masks and sends gradients.

It runs the decoder at the same times and in the same order as the leader in `dispfx.learning.trainer`,
because the decoder may be sharded over all ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.learning.learner import Problem, backward_decoder, check_gates, check_samples
from dispfx.learning.scores import starting_logits
from dispfx.learning.text import Prefetcher

HELD_OUT_BATCHES = 8
# Encoded first steps of a run that resumes nothing, and of a run that does not start.
NEW_RUN, NO_RUN = -1, -2


def follow(problem: Problem) -> None:
    """Compute every step of the run with the leader, until the leader ends the run.

    Raises:
        PassError, DispfxError: if a gate does not act on this rank.
        RankLost: if another rank died.
    """
    begin = receive_start(problem)
    if begin is None:
        return
    settings = problem.settings
    if begin.step < settings.steps:
        check_gates(problem)
        check_samples(problem)
    if begin.is_new and settings.start == "sensitivity":
        starting_logits(problem)
    batches = Prefetcher(problem.batch, problem.device)
    for step in range(begin.step, settings.steps):
        masks = problem.ranks.send(torch.empty(problem.mask_shape, device=problem.device))
        if says_stop(masks):
            return
        masks.requires_grad_()
        loss = backward_decoder(problem, batches, masks, step)
        assert masks.grad is not None
        problem.ranks.average(masks.grad)
        problem.ranks.average(loss)
        if measures(problem, step + 1):
            held_out_loss(problem, torch.empty(problem.features, device=problem.device))


@dataclass(frozen=True)
class Start:
    """The first step of a run, and whether it starts without a state."""

    step: int
    is_new: bool


def send_start(problem: Problem, start: Start | None) -> None:
    """Broadcast the first step to the other ranks, or that the run does not start."""
    number = NO_RUN if start is None else NEW_RUN if start.is_new else start.step
    problem.ranks.send(torch.tensor(number, device=problem.device))


def receive_start(problem: Problem) -> Start | None:
    """Return the first step broadcast by the leader, or None if the run does not start."""
    number = int(problem.ranks.send(torch.tensor(0, device=problem.device)))
    return None if number == NO_RUN else Start(max(number, 0), number == NEW_RUN)


def send_stop(problem: Problem, step: int, *, measured: int) -> None:
    """End the run on the other ranks, which are waiting for masks.

    A NaN, which no mask contains, is the end marker.

    Args:
        step: steps done.
        measured: step after which the held-out loss was last measured, or would have been.
    """
    if step > measured and measures(problem, step):
        problem.ranks.send(torch.full((problem.features,), torch.nan, device=problem.device))
    if step < problem.settings.steps:
        problem.ranks.send(torch.full(problem.mask_shape, torch.nan, device=problem.device))


def says_stop(masks: Tensor) -> bool:
    """Whether the masks are the end marker."""
    return bool(masks.flatten()[0].isnan())


def measures(problem: Problem, step: int) -> bool:
    """Whether the held-out loss is measured after this number of steps."""
    every = problem.settings.held_out_every
    return every > 0 and step % every == 0 and bool(problem.text.held_out_batches(1))


@torch.no_grad()
def held_out_loss(problem: Problem, masks_N: Tensor) -> float | None:
    """Return the loss on the start of the held-out text under the leader's masks, if it sent any."""
    if says_stop(problem.ranks.send(masks_N)):
        return None
    batches = problem.text.held_out_batches(HELD_OUT_BATCHES)
    losses = [problem.loss(ids_BT, masks_N) for ids_BT in batches]
    return float(torch.stack(losses).mean())
