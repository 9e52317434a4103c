"""The hypernetwork's part of a step: logits before the decoder runs, and gradients after it.

    logits = hypernetwork()                                                         (N,)
    R = mean over S of budget_loss(count(masks))
    ∂/∂logits = Σ over S of (∂loss/∂masks + λ ∂R/∂masks) · slope,  then back through the hypernetwork

`Update` does it operation by operation.  `ReplayedUpdate` does the same as two CUDA graphs: a hundred small
kernels, each of which takes longer to start than to run.

Legend: N features of all groups of sites, S samples of the masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.learning.objective import budget_loss

Count = Callable[[Tensor], Tensor]

_WARM_UPS = 2
_TOLERANCE = 1e-3


class Update:
    """From parameters to logits, and from the gradient of the masks to that of the parameters.

    Args:
        hypernetwork: without inputs, gives logits (N,).
        count: masks (N,) or (S, N) -> parameters left, one number a sample.
        target: parameters that should be left.
        weight: λ, of the budget loss.
    """

    def __init__(self, hypernetwork: nn.Module, count: Count, target: float, weight: float):
        self.hypernetwork = hypernetwork
        self.parameters = list(hypernetwork.parameters())
        self._count, self._target, self._weight = count, target, weight
        self._logits_N: Tensor | None = None

    def logits(self) -> Tensor:
        """Return logits (N,) without gradient, and remember how they came about."""
        self._logits_N = self.hypernetwork()
        assert self._logits_N is not None
        return self._logits_N.detach()

    def gradients(self, loss: Tensor, masks: Tensor, of_masks: Tensor, slope: Tensor) -> Tensor:
        """Set the gradients of the parameters for the logits last returned.

        Args:
            loss: of the decoder, a scalar.
            masks: (N,) or (S, N).
            of_masks: gradient of the loss for them.
            slope: of the same shape (see `Sample`).

        Returns:
            (4,) float64: loss, budget loss, parameters left, norm of the gradients.
        """
        assert self._logits_N is not None
        gradients, numbers = self._back(self._logits_N, loss, masks, of_masks, slope)
        self._logits_N = None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return numbers

    def _back(
        self, logits_N: Tensor, loss: Tensor, masks: Tensor, of_masks: Tensor, slope: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        leaf = masks.detach().requires_grad_()
        left = self._count(leaf)
        over_budget = budget_loss(left, self._target).mean()
        (of_budget,) = torch.autograd.grad(self._weight * over_budget, leaf)
        of_logits = (of_masks + of_budget) * slope
        of_logits_N = of_logits.sum(0) if of_logits.dim() == 2 else of_logits
        gradients = torch.autograd.grad(logits_N, self.parameters, of_logits_N)
        norm = torch.nn.utils.get_total_norm(gradients)
        numbers = [value.detach().double() for value in (loss, over_budget, left.mean(), norm)]
        return gradients, torch.stack(numbers)


class ReplayedUpdate(Update):
    """The same as two CUDA graphs.

    Args:
        update: what to do; its parameters must stay where they are.
        shape: of the masks, (N,) or (S, N).
    """

    def __init__(self, update: Update, shape: tuple[int, ...]):
        super().__init__(update.hypernetwork, update._count, update._target, update._weight)
        device = self.parameters[0].device
        self._loss = torch.zeros((), device=device)
        self._masks, self._of_masks, self._slope = (torch.ones(shape, device=device) for _ in range(3))
        self._warm_up(device)
        self._before, self._behind = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._before):
            logits_N = self.hypernetwork()
        with torch.cuda.graph(self._behind, pool=self._before.pool()):
            self._gradients, self._numbers = self._back(logits_N, *self._inputs())
        # Only the memory is needed from now on, not what autograd knows about it.
        self._given_N = logits_N.detach()

    def logits(self) -> Tensor:
        """Return logits (N,); they are overwritten by the next call."""
        self._before.replay()
        return self._given_N

    def gradients(self, loss: Tensor, masks: Tensor, of_masks: Tensor, slope: Tensor) -> Tensor:
        """As `Update.gradients`; the gradients are overwritten by the next call."""
        given = (loss, masks, of_masks, slope)
        for place, value in zip(self._inputs(), given, strict=True):
            place.copy_(value.detach())
        self._behind.replay()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._numbers

    def _inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._loss, self._masks, self._of_masks, self._slope

    def _warm_up(self, device: torch.device) -> None:
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._back(self.hypernetwork(), *self._inputs())
        current.wait_stream(side)
        torch.cuda.synchronize(device)


def fastest_update(update: Update, shape: tuple[int, ...], device: torch.device) -> Update:
    """Return a replayed update where a GPU can and gets the same numbers, and `update` otherwise."""
    if device.type != "cuda":
        return update
    try:
        replayed = ReplayedUpdate(update, shape)
        agrees = _agree(replayed, update, shape, device)
    except Exception:  # an operation that cannot be captured; the plain update is there
        agrees, replayed = False, update
    for parameter in update.parameters:
        parameter.grad = None
    return replayed if agrees else update


def _agree(replayed: Update, update: Update, shape: tuple[int, ...], device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    given: list[Any] = [torch.rand(shape, generator=generator).to(device) for _ in range(3)]
    given[0] = given[0].round()
    results = []
    for way in (update, replayed):
        logits_N = way.logits().clone()
        numbers = way.gradients(torch.ones((), device=device), *given).clone()
        gradients = [parameter.grad for parameter in update.parameters]
        assert all(gradient is not None for gradient in gradients)
        # Sums tell a wrong replay from a right one, and cost no second copy of the heads' gradients.
        sums = torch.stack([gradient.double().abs().sum() for gradient in gradients if gradient is not None])
        results.append((logits_N.double(), numbers, sums))
    return all(torch.allclose(a, b, rtol=_TOLERANCE) for a, b in zip(*results, strict=True))
