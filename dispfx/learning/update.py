"""The hypernetwork's part of a step: logits before the decoder runs, and gradients after it.

    logits = hypernetwork()                                                         (N,)
    R = mean over S of eased(budget_loss(count(counted)))         + as much for every further term
    ∂/∂logits = Σ over S of ∂loss/∂masks · slope + λ ∂R/∂counted · slope of counted,
    then back through the hypernetwork

`counted` is the masks, or the vector of probabilities that they were drawn with.

`Update` runs it operation by operation.  `ReplayedUpdate` runs it as two CUDA graphs, because it consists of
a hundred small kernels that take longer to launch than to run.

Legend: N features of all groups of sites, S samples of the masks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from dispfx.errors import first_line
from dispfx.kernels.recording import recording, warm_up
from dispfx.learning.hypernetwork import Hypernetwork, OuterProducts
from dispfx.learning.objective import Term, budget_loss, eased

Count = Callable[[Tensor], Tensor]
Shape = tuple[int, ...]

_WARM_UPS = 2
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Surrogate:
    """Values of the features and ∂value/∂logit, both (N,) or (S, N)."""

    values: Tensor
    surrogate: Tensor


class Update:
    """From parameters to logits, and from the gradient of the masks to the gradient of the parameters.

    Args:
        hypernetwork: without inputs, gives logits (N,).
        count: masks (N,) or (S, N) -> remaining parameters, one number per sample.
        target: number of parameters that should remain; None if only the further terms have a target.
        weight: λ, of the budget loss.
        width: of the quadratic part of the budget loss.
        further: terms of the budget loss.

    Attributes:
        outer: gradients of the parameters that have them as outer products, of the last call of `gradients`.
    """

    def __init__(
        self,
        hypernetwork: Hypernetwork,
        count: Count,
        target: float | None,
        weight: float,
        width: float = 0.0,
        further: Sequence[Term] = (),
    ):
        self.hypernetwork = hypernetwork
        self.outer: OuterProducts = {}
        self._count, self._target, self._weight, self._width = count, target, weight, width
        self._further = tuple(further)
        self._logits_N: Tensor | None = None

    def logits(self) -> Tensor:
        """Return logits (N,) without gradient, and keep their autograd graph."""
        self._logits_N = self.hypernetwork()
        assert self._logits_N is not None
        return self._logits_N.detach()

    def gradients(self, loss: Tensor, of_masks: Surrogate, counted: Surrogate) -> Tensor:
        """Set the gradients of the parameters, or `outer`, for the last returned logits.

        Args:
            loss: of the decoder, a scalar.
            of_masks: gradient of the loss for the masks, and their surrogate gradient (see `Sample`).
            counted: input of the budget loss.

        Returns:
            (4,) float64: loss, budget loss of all terms, remaining parameters, norm of the gradients.
        """
        assert self._logits_N is not None
        found = self._back(self._logits_N, loss, of_masks, counted)
        self._logits_N = None
        return self._set(found)

    def _set(self, found: "_Gradients") -> Tensor:
        self.outer = found.outer
        for parameter, gradient in found.written.items():
            parameter.grad = gradient
        return found.numbers

    def _back(self, logits_N: Tensor, loss: Tensor, of_masks: Surrogate, counted: Surrogate) -> "_Gradients":
        leaf = counted.values.detach().requires_grad_()
        left = self._count(leaf)
        over = [] if self._target is None else [budget_loss(left, self._target)]
        over += [budget_loss(term.count(leaf), term.target) for term in self._further]
        pull = self._weight * torch.stack([eased(one, self._width).mean() for one in over]).sum()
        (of_counted,) = torch.autograd.grad(pull, leaf)
        of_logits_N = _over_samples(of_masks.values * of_masks.surrogate)
        of_logits_N = of_logits_N + _over_samples(of_counted * counted.surrogate)
        outer = self.hypernetwork.outer_gradients(of_logits_N)
        others = [parameter for parameter in self.hypernetwork.parameters() if parameter not in outer]
        gradients = torch.autograd.grad(logits_N, others, of_logits_N) if others else ()
        # The norm of all is that of the norms of parts.
        norm = torch.nn.utils.get_total_norm([*gradients, *(product.norms() for product in outer.values())])
        over_budget = torch.stack([one.mean() for one in over]).sum()
        numbers = [value.detach().double() for value in (loss, over_budget, left.mean(), norm)]
        return _Gradients(dict(zip(others, gradients, strict=True)), outer, torch.stack(numbers))


@dataclass(frozen=True, eq=False)
class _Gradients:
    """The result of a step: gradients, dense or as outer products, and its numbers (4,)."""

    written: Mapping[nn.Parameter, Tensor]
    outer: OuterProducts
    numbers: Tensor


def _over_samples(values: Tensor) -> Tensor:
    """Return the sum over samples, (N,)."""
    return values.sum(0) if values.dim() == 2 else values


class ReplayedUpdate(Update):
    """The same as two CUDA graphs.

    Args:
        update: to replay; the memory of its parameters must not move.
        shape: of the masks, (N,) or (S, N).
        counted: shape of the input of the budget loss.
    """

    def __init__(self, update: Update, shape: Shape, counted: Shape):
        super().__init__(
            update.hypernetwork,
            update._count,
            update._target,
            update._weight,
            update._width,
            update._further,
        )
        device = next(self.hypernetwork.parameters()).device
        self._loss = torch.zeros((), device=device)
        self._of_masks, self._counted = (
            Surrogate(torch.ones(each, device=device), torch.ones(each, device=device))
            for each in (shape, counted)
        )
        warm_up(lambda: self._once(self.hypernetwork()), _WARM_UPS, device)
        self._before, self._behind = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with recording(self._before, device):
            logits_N = self.hypernetwork()
        with recording(self._behind, device, self._before.pool()):
            self._found = self._once(logits_N)
        # From now on only the memory is needed, not its autograd graph.
        self._given_N = logits_N.detach()

    def logits(self) -> Tensor:
        """Return logits (N,), which the next call overwrites."""
        self._before.replay()
        return self._given_N

    def gradients(self, loss: Tensor, of_masks: Surrogate, counted: Surrogate) -> Tensor:
        """As `Update.gradients`; the next call overwrites the gradients."""
        self._loss.copy_(loss.detach())
        for place, given in ((self._of_masks, of_masks), (self._counted, counted)):
            place.values.copy_(given.values.detach())
            place.surrogate.copy_(given.surrogate.detach())
        self._behind.replay()
        return self._set(self._found)

    def _once(self, logits_N: Tensor) -> _Gradients:
        return self._back(logits_N, self._loss, self._of_masks, self._counted)


def fastest_update(
    update: Update,
    shape: Shape,
    counted: Shape,
    device: torch.device,
    note: Callable[[str], None] = lambda text: None,
) -> Update:
    """Return a replayed update if a GPU supports it and the numbers agree, otherwise `update`.

    Args:
        shape, counted: as `ReplayedUpdate`.
        note: called with the reason if a GPU does not replay.
    """
    if device.type != "cuda":
        return update
    try:
        replayed = ReplayedUpdate(update, shape, counted)
        obstacle = None if _agree(replayed, update, shape, counted, device) else "its numbers differ"
    except Exception as error:  # an operation that cannot be captured; use the plain update
        replayed, obstacle = update, first_line(error)
    update.hypernetwork.zero_grad(set_to_none=True)
    if obstacle is None:
        return replayed
    note(f"the hypernetwork is not replayed as a CUDA graph: {obstacle}")
    return update


def _agree(replayed: Update, update: Update, shape: Shape, counted: Shape, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)

    def numbers_of(shape: Shape) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    of_masks = Surrogate(numbers_of(shape), numbers_of(shape))
    kept = Surrogate(numbers_of(counted).round(), numbers_of(counted))
    results = []
    for way in (update, replayed):
        logits_N = way.logits().clone()
        numbers = way.gradients(torch.ones((), device=device), of_masks, kept).clone()
        gradients = [parameter.grad for parameter in update.hypernetwork.parameters()]
        factors = [(product.left_CW, product.right_CF) for product in way.outer.values()]
        parts = [part for part in [*gradients, *chain.from_iterable(factors)] if part is not None]
        # Sums are enough to detect a wrong replay.
        sums = torch.stack([part.double().abs().sum() for part in parts])
        results.append((logits_N.double(), numbers, sums))
    return all(torch.allclose(a, b, rtol=_TOLERANCE) for a, b in zip(*results, strict=True))
