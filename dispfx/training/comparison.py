"""Compare two ways to compute the loss of a decoder and its gradient for the masks.

A compiler's fault in a backward pass shows nowhere but in the gradient, so it is compared once at the start
of every run, before anything is learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

# Masks of the comparison lie in [1 − this, 1]: all different, and the decoder works as the dense one does.
# Dropping one feature in ten at random leaves a trained decoder with nothing but rounding: of SmolLM2-135M in
# bfloat16 the plain gradients themselves were 62% from those in float32 then (16 sequences of 64 tokens).
_FARTHEST = 0.05
# Relative: other kernels sum in another order.  Where routing or rounding decides between features, single
# gradients differ much more than the vector of all of them does.
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
GRADIENT_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
HALF_LOSS_TOLERANCE = 1e-2
# Seen: compiled gradients of SmolLM2-135M in bfloat16 are 8e-2 from plain ones, and those 7e-2 from
# gradients in float32; no site's cosine is below 0.98.
HALF_GRADIENT_TOLERANCE = 0.25
# A site whose gradient is wrong hardly shows in the vector of all sites, but in its own direction.
DIRECTION = 0.99
HALF_DIRECTION = 0.8
# Of the largest gradient of a site: what is smaller is rounding.
_SMALLEST = 1e-4


@dataclass(frozen=True)
class Comparison:
    """How far two ways are apart.

    Args:
        loss: |a − b| / |b| of the losses.
        gradient: |a − b| / |b| of the gradients, Euclidean.
        direction: smallest cosine between the two gradients of a site.
        dtype: that the decoder computes in.
    """

    loss: float
    gradient: float
    direction: float
    dtype: torch.dtype

    @property
    def holds(self) -> bool:
        """Whether both are within the tolerance of the dtype; a NaN is not."""
        loss = LOSS_TOLERANCE.get(self.dtype, HALF_LOSS_TOLERANCE)
        gradient = GRADIENT_TOLERANCE.get(self.dtype, HALF_GRADIENT_TOLERANCE)
        direction = DIRECTION if self.dtype in GRADIENT_TOLERANCE else HALF_DIRECTION
        return self.loss <= loss and self.gradient <= gradient and self.direction >= direction

    def __str__(self) -> str:
        return f"loss {self.loss:.1e}, gradient {self.gradient:.1e}, smallest cosine {self.direction:.3f}"


def sample_masks(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return masks (N,) or (S, N) of numbers a little below one, the same every time."""
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return (1.0 - _FARTHEST * noise).to(device)


def value_and_gradient(loss: Loss, ids_BT: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient for the masks."""
    leaf = masks.clone().requires_grad_()
    value = loss(ids_BT, leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach().clone(), gradient.clone()


def compare(
    loss: Loss,
    reference: Loss,
    ids_BT: Tensor,
    masks: Tensor,
    dtype: torch.dtype,
    sizes: Sequence[int] | None = None,
) -> Comparison:
    """Compare `loss` with `reference` at one batch.

    Args:
        masks: (N,) or (S, N).
        dtype: that the decoder computes in.
        sizes: features of every site, in the order of the masks; one site by default.
    """
    value, gradient = value_and_gradient(loss, ids_BT, masks)
    expected, of_expected = value_and_gradient(reference, ids_BT, masks)
    sites = list(sizes) if sizes is not None else [masks.shape[-1]]
    return Comparison(
        float((value - expected).abs() / expected.abs().clamp_min(1e-30)),
        float((gradient - of_expected).norm() / of_expected.norm().clamp_min(1e-30)),
        _smallest_cosine(gradient.split(sites, -1), of_expected.split(sites, -1)),
        dtype,
    )


def _smallest_cosine(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    a = torch.stack([part.double().norm() for part in found])
    b = torch.stack([part.double().norm() for part in expected])
    products = torch.stack([(x.double() * y.double()).sum() for x, y in zip(found, expected, strict=True)])
    cosines = products / (a * b).clamp_min(1e-300)
    return float(cosines.masked_fill(b <= _SMALLEST * b.max(), 1.0).min())
