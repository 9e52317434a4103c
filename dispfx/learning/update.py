"""The hypernetwork's part of a step: logits before the decoder runs, and gradients after it.

    logits = hypernetwork()                                  (K, N), one row for a single ratio
    R = mean of eased(budget_loss(count(counted), target)), and as much for every further term
    ∂/∂logits = Σ over S of weights · (∂loss/∂masks · slope) + λ ∂R/∂counted · slope of counted,
    then back through the hypernetwork

`counted` is the masks, each with the target of the ratio that it was drawn for, or the knots' vectors of
probabilities, each with the target of its knot.  `weights` (S, K) say how much of every knot a mask was drawn
from; for a single ratio there is one knot, and they are 1.

`Update` runs it operation by operation.  `ReplayedUpdate` runs it as two CUDA graphs, because it consists of
a hundred small kernels that take longer to launch than to run.

Legend: N features of all groups of sites, K knots, S samples of the masks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from dispfx.errors import first_line
from dispfx.kernels.recording import recording, warm_up
from dispfx.learning.hypernetwork import Hypernetwork, OuterProducts
from dispfx.learning.objective import Term, budget_loss, eased
from dispfx.plan.knots import unmixed

Count = Callable[[Tensor], Tensor]

_WARM_UPS = 2
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Values of the features and ∂value/∂logit, both (S, N) or (K, N)."""

    values: Tensor
    surrogate: Tensor


@dataclass(frozen=True, eq=False)
class StepTensors:
    """What a step gives the update, all on its device.

    Args:
        loss: of the decoder, a scalar.
        of_masks: gradient of the loss for the masks, and their surrogate gradient (see `Sample`), (S, N).
        counted: input of the budget loss: the masks (S, N), or probabilities (K, N).
        weights_SK: of every knot for every mask.
        targets: number of parameters that should remain, for every row of `counted`, float64.
    """

    loss: Tensor
    of_masks: Surrogate
    counted: Surrogate
    weights_SK: Tensor
    targets: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in one order."""
        of_masks, counted = self.of_masks, self.counted
        surrogates = (of_masks.values, of_masks.surrogate, counted.values, counted.surrogate)
        return (self.loss, *surrogates, self.weights_SK, self.targets)

    def map(self, change: Callable[[Tensor], Tensor]) -> "StepTensors":
        """Return the same with every tensor changed."""
        loss, of_masks, its_slope, counted, its_own, weights_SK, targets = map(change, self.tensors)
        return StepTensors(
            loss, Surrogate(of_masks, its_slope), Surrogate(counted, its_own), weights_SK, targets
        )


class Update:
    """From parameters to logits, and from the gradient of the masks to the gradient of the parameters.

    Args:
        hypernetwork: without inputs, gives logits (N,), or (K, N) for a range of ratios.
        count: masks (S, N) -> remaining parameters, one number per sample, or (S, P) for P costs.
        weight: λ, of the budget loss.
        width: of the quadratic part of the budget loss.
        counts_masks: whether the masks are counted, and not the probabilities of the knots.
        of_ratio: whether the remaining parameters have a target, and not the further terms alone.
        further: terms of the budget loss.

    Attributes:
        outer: gradients of the parameters that have them as outer products, of the last call of `gradients`.
    """

    def __init__(
        self,
        hypernetwork: Hypernetwork,
        count: Count,
        weight: float,
        width: float = 0.0,
        *,
        counts_masks: bool = True,
        of_ratio: bool = True,
        further: Sequence[Term] = (),
    ):
        self.hypernetwork = hypernetwork
        self.outer: OuterProducts = {}
        self._count, self._weight, self._width, self._counts_masks = count, weight, width, counts_masks
        self._of_ratio, self._further = of_ratio, tuple(further)
        self._logits: Tensor | None = None

    def logits(self) -> Tensor:
        """Return logits (K, N) without gradient, and keep their autograd graph."""
        self._logits = self.hypernetwork()
        assert self._logits is not None
        return _rows(self._logits.detach())

    def gradients(self, given: StepTensors) -> Tensor:
        """Set the gradients of the parameters, or `outer`, for the last returned logits.

        Returns:
            (4,) float64: loss, budget loss of all terms, remaining parameters, norm of the gradients.
        """
        assert self._logits is not None
        found = self._back(self._logits, given)
        self._logits = None
        return self._set(found)

    def _set(self, found: "_Gradients") -> Tensor:
        self.outer = found.outer
        for parameter, gradient in found.written.items():
            parameter.grad = gradient
        return found.numbers

    def _back(self, logits: Tensor, given: StepTensors) -> "_Gradients":
        leaf = given.counted.values.detach().requires_grad_()
        left = self._count(leaf)
        over = [budget_loss(left, given.targets)] if self._of_ratio else []
        over += [term.loss(leaf) for term in self._further]
        pull = self._weight * torch.stack([eased(one, self._width).mean() for one in over]).sum()
        (of_counted,) = torch.autograd.grad(pull, leaf)
        of_counted = of_counted * given.counted.surrogate
        of_logits_KN = unmixed(given.of_masks.values * given.of_masks.surrogate, given.weights_SK)
        # Masks were drawn from several knots, and probabilities are those of a knot.
        of_logits_KN = of_logits_KN + (
            unmixed(of_counted, given.weights_SK) if self._counts_masks else of_counted
        )
        of_logits = of_logits_KN.view_as(logits)
        outer = self.hypernetwork.outer_gradients(of_logits)
        others = [parameter for parameter in self.hypernetwork.parameters() if parameter not in outer]
        gradients = torch.autograd.grad(logits, others, of_logits) if others else ()
        # The norm of all is that of the norms of parts.
        norm = torch.nn.utils.get_total_norm([*gradients, *(product.norms() for product in outer.values())])
        over_budget = torch.stack([one.mean() for one in over]).sum()
        numbers = [value.detach().double() for value in (given.loss, over_budget, left.mean(), norm)]
        return _Gradients(dict(zip(others, gradients, strict=True)), outer, torch.stack(numbers))


@dataclass(frozen=True, eq=False)
class _Gradients:
    """The result of a step: gradients, dense or as outer products, and its numbers (4,)."""

    written: Mapping[nn.Parameter, Tensor]
    outer: OuterProducts
    numbers: Tensor


def _rows(logits: Tensor) -> Tensor:
    """Return logits (K, N); those of a single ratio are one row."""
    return logits.view(-1, logits.shape[-1])


class ReplayedUpdate(Update):
    """The same as two CUDA graphs.

    Args:
        update: to replay; the memory of its parameters must not move.
        like: what a step gives; only shapes and types count.
    """

    def __init__(self, update: Update, like: StepTensors):
        super().__init__(
            update.hypernetwork,
            update._count,
            update._weight,
            update._width,
            counts_masks=update._counts_masks,
            of_ratio=update._of_ratio,
            further=update._further,
        )
        device = like.loss.device
        self._given = like.map(torch.ones_like)
        warm_up(lambda: self._back(self.hypernetwork(), self._given), _WARM_UPS, device)
        self._before, self._behind = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recording(self._before, device):
            logits = self.hypernetwork()
        with recording(self._behind, device, self._before.pool()):
            self._found = self._back(logits, self._given)
        # From now on only the memory is needed, not its autograd graph.
        self._given_KN = _rows(logits.detach())

    def logits(self) -> Tensor:
        """Return logits (K, N), which the next call overwrites."""
        self._before.replay()
        return self._given_KN

    def gradients(self, given: StepTensors) -> Tensor:
        """As `Update.gradients`; the next call overwrites the gradients."""
        for place, tensor in zip(self._given.tensors, given.tensors, strict=True):
            place.copy_(tensor.detach())
        self._behind.replay()
        return self._set(self._found)


def fastest_update(
    update: Update,
    like: StepTensors,
    device: torch.device,
    note: Callable[[str], None] = lambda text: None,
) -> Update:
    """Return a replayed update if a GPU supports it and the numbers agree, otherwise `update`.

    Args:
        like: as `ReplayedUpdate`.
        device: of the step.
        note: called with the reason if a GPU does not replay.
    """
    if device.type != "cuda":
        return update
    try:
        replayed = ReplayedUpdate(update, like)
        obstacle = None if _agree(replayed, update, like) else "its numbers differ"
    except Exception as error:  # an operation that cannot be captured; use the plain update
        replayed, obstacle = update, first_line(error)
    update.hypernetwork.zero_grad(set_to_none=True)
    if obstacle is None:
        return replayed
    note(f"the hypernetwork is not replayed as a CUDA graph: {obstacle}")
    return update


def _agree(replayed: Update, update: Update, like: StepTensors) -> bool:
    generator = torch.Generator().manual_seed(0)
    given = like.map(lambda tensor: torch.rand(tensor.shape, generator=generator).to(tensor))
    given = replace(given, counted=replace(given.counted, values=given.counted.values.round()))
    results = []
    for way in (update, replayed):
        logits_KN = way.logits().clone()
        numbers = way.gradients(given).clone()
        gradients = [parameter.grad for parameter in update.hypernetwork.parameters()]
        factors = [(product.left_CW, product.right_CF) for product in way.outer.values()]
        parts = [part for part in [*gradients, *chain.from_iterable(factors)] if part is not None]
        # Sums are enough to detect a wrong replay.
        sums = torch.stack([part.double().abs().sum() for part in parts])
        results.append((logits_KN.double(), numbers, sums))
    return all(torch.allclose(a, b, rtol=_TOLERANCE) for a, b in zip(*results, strict=True))
