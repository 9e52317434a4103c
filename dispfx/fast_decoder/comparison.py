"""Compare two ways to compute the loss of a decoder and its gradient for the masks.

A compiler's fault in a backward pass shows nowhere but in the gradient, so it is compared once at the start
of every run, before anything is learned.

In half precision two right ways differ by what each rounds, and in a wide decoder that is much.  How much is
seen where the plainer way is computed with masks that are nudged by at most a unit in the last place:
everything is rounded anew then, and hardly anything else is different.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
# A loss, and its gradient for each of several tensors.
Outcome = tuple[Tensor, Sequence[Tensor]]

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
# What differs by that many times what rounding does may be rounding.  Seen: 0.7 to 1.1 times for decoders of
# 32 and 80 layers (CPU, bfloat16).  Beyond this limit a gradient is of no use, whatever the reason.
_BESIDE_ROUNDING = 1.5
MOST_GRADIENT = 0.5


@dataclass(frozen=True)
class Comparison:
    """How far two ways are apart.

    Args:
        loss: |a − b| / |b| of the losses.
        gradient: |a − b| / |b| of the gradients, Euclidean.
        direction: smallest cosine between the two gradients of a site.
        dtype: that the decoder computes in.
        rounding: how far the plainer way is from itself where it is rounded anew, if that was asked.
    """

    loss: float
    gradient: float
    direction: float
    dtype: torch.dtype
    rounding: "Comparison | None" = None

    @property
    def holds(self) -> bool:
        """Whether both are within the tolerance of the dtype, or what rounding does; a NaN is not."""
        loss = LOSS_TOLERANCE.get(self.dtype, HALF_LOSS_TOLERANCE)
        gradient, direction = self._limits()
        return self.loss <= loss and self.gradient <= gradient and self.direction >= direction

    def _limits(self) -> tuple[float, float]:
        """Return the largest difference of gradients and the smallest cosine that hold."""
        if is_exact(self.dtype):
            return GRADIENT_TOLERANCE[self.dtype], DIRECTION
        if self.rounding is None or not math.isfinite(self.rounding.gradient):
            return HALF_GRADIENT_TOLERANCE, HALF_DIRECTION
        gradient = min(MOST_GRADIENT, _BESIDE_ROUNDING * self.rounding.gradient)
        # Each site's direction stays: one that is noisy says nothing of another.
        return max(HALF_GRADIENT_TOLERANCE, gradient), HALF_DIRECTION

    def __str__(self) -> str:
        figures = f"loss {self.loss:.1e}, gradient {self.gradient:.1e}, smallest cosine {self.direction:.3f}"
        if self.rounding is None:
            return figures
        return f"{figures}; by rounding alone {self.rounding.gradient:.1e} and {self.rounding.direction:.3f}"


def is_exact(dtype: torch.dtype) -> bool:
    """Whether rounding is too small in a dtype to matter here."""
    return dtype in GRADIENT_TOLERANCE


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
    return difference((value, gradient.split(sites, -1)), (expected, of_expected.split(sites, -1)), dtype)


def difference(found: Outcome, expected: Outcome, dtype: torch.dtype) -> Comparison:
    """Return how far two losses are apart, and their gradients for several tensors."""
    pairs = list(zip(found[1], expected[1], strict=True))
    apart, a, b, products = (
        torch.stack([number(x.double(), y.double()) for x, y in pairs])
        for number in (
            lambda x, y: (x - y).norm(),
            lambda x, y: x.norm(),
            lambda x, y: y.norm(),
            lambda x, y: (x * y).sum(),
        )
    )
    cosines = products / (a * b).clamp_min(1e-300)
    return Comparison(
        float((found[0] - expected[0]).abs() / expected[0].abs().clamp_min(1e-30)),
        float(apart.norm() / b.norm().clamp_min(1e-30)),
        float(cosines.masked_fill(b <= _SMALLEST * b.max(), 1.0).min()),
        dtype,
    )


def beside_rounding(
    found: Comparison, reference: Loss, ids_BT: Tensor, masks: Tensor, sizes: Sequence[int] | None = None
) -> Comparison:
    """Return a comparison with what rounding alone does to `reference`, at its batch and masks."""
    noise = torch.rand(masks.shape, generator=torch.Generator().manual_seed(1)).to(masks.device)
    # Below one a unit in the last place is half of eps.
    nudge = 1.0 - torch.finfo(found.dtype).eps / 2 * noise

    def rounded_anew(ids_BT: Tensor, masks: Tensor) -> Tensor:
        return reference(ids_BT, masks * nudge)

    return replace(found, rounding=compare(rounded_anew, reference, ids_BT, masks, found.dtype, sizes))
