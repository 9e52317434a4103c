"""Compare two ways to compute the loss of a decoder and its gradient for the masks.

A compiler's fault in a backward pass shows nowhere but in the gradient, so it is compared once at the start
of every run, before anything is learned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

# Masks of the comparison drop one feature in ten, so that gradients are those of a step and not of the
# dense decoder.
_DROPPED = 0.1
# Relative: other kernels sum in another order.  Where routing or rounding decides between features, single
# gradients differ much more than the vector of all of them does.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
GRADIENT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
HALF_LOSS_TOLERANCE = 1e-2
HALF_GRADIENT_TOLERANCE = 0.1


@dataclass(frozen=True)
class Comparison:
    """How far two ways are apart.

    Args:
        loss: |a − b| / |b| of the losses.
        gradient: |a − b| / |b| of the gradients, Euclidean.
        dtype: that the decoder computes in.
    """

    loss: float
    gradient: float
    dtype: torch.dtype

    @property
    def holds(self) -> bool:
        """Whether both are within the tolerance of the dtype; a NaN is not."""
        loss = LOSS_TOLERANCE.get(self.dtype, HALF_LOSS_TOLERANCE)
        gradient = GRADIENT_TOLERANCE.get(self.dtype, HALF_GRADIENT_TOLERANCE)
        return self.loss <= loss and self.gradient <= gradient

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, gradient {self.gradient:.1e}"


def sample_masks(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return masks (N,) or (S, N) of zeros and ones, the same every time."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (noise > _DROPPED).float().to(device)


def value_and_gradient(loss: Loss, ids_BT: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient for the masks."""
    leaf = masks.clone().requires_grad_()
    value = loss(ids_BT, leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach().clone(), gradient.clone()


def compare(loss: Loss, reference: Loss, ids_BT: Tensor, masks: Tensor, dtype: torch.dtype) -> Comparison:
    """Compare `loss` with `reference` at one batch."""
    value, gradient = value_and_gradient(loss, ids_BT, masks)
    expected, of_expected = value_and_gradient(reference, ids_BT, masks)
    return Comparison(
        float((value - expected).abs() / expected.abs().clamp_min(1e-30)),
        float((gradient - of_expected).norm() / of_expected.norm().clamp_min(1e-30)),
        dtype,
    )
