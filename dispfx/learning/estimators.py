"""Sample hard masks from logits, and pass a gradient through the sample.

All features are independent bits, so an estimator is one formula for the *slope* (surrogate gradient): the
factor between the gradient of a bit and the gradient of its logit.  The input is one flat vector of logits;
nothing here knows sites.

Names: θ logit, τ temperature, p = sigmoid(θ), u uniform in (0, 1), D the sampled bit.  Antithetic samples
come in pairs from u and 1 - u (antithetic variates; Hammersley and Morton 1956): each has the usual
distribution, and part of the noise cancels in the mean of their gradients.

A custom estimator, `mine.py:draw` or a Python function, is called in every step with

    logits       (N,) or (S, N) float32, with gradients
    temperature  the setting
    generator    of the run, on the logits' device; draw from it to make runs repeatable and resumable

and returns masks of the shape of `logits`, in [0, 1], differentiable in the logits; this gradient is the
slope.  The mask of a feature must depend only on its own logit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dispfx.errors import DispfxError
from dispfx.settings.learning_settings import EstimatorName
from dispfx.words.own_function import OwnFunction, own_or_choice

_ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class Sample:
    """A sampled mask and its surrogate gradient.

    Args:
        mask: (N,) or (S, N) zeros and ones, of the logits' type.
        slope: of the same shape, the estimator's surrogate for ∂mask/∂logit.
    """

    mask: Tensor
    slope: Tensor


class Estimator(Protocol):
    """Draws hard masks with P(D = 1) = sigmoid(θ) (where the temperature is 1)."""

    def sample(self, logits: Tensor, generator: torch.Generator) -> Sample:
        """Sample masks for logits (N,), or S of them for logits repeated to (S, N).

        The generator is on the logits' device.
        """
        ...


@dataclass(frozen=True)
class ReinMax:
    """Second-order estimator of binary gradients (ReinMax, arXiv 2304.08612, algorithm 2).

        π0 = p,   D ~ Bernoulli(π0)
        π1 = (D + sigmoid(θ/τ)) / 2
        π1 = sigmoid(stop_gradient(logit(π1) − θ) + θ)
        π2 = 2 π1 − π0 / 2
        mask = π2 − stop_gradient(π2) + D,   slope = 2 π1 (1 − π1) − p (1 − p) / 2

    The third line is printed with ln(π1) in arXiv 2410.11988 (algorithm 2, line 4), which is a slip:
    the line is to leave the value of π1 as it is, and sigmoid(ln(π1)) = π1 / (1 + π1) does not.  With
    logit and τ = 1 the expected gradient is exact for objectives that are quadratic in every bit.
    """

    temperature: float = 1.0
    antithetic: bool = False

    def sample(self, logits: Tensor, generator: torch.Generator) -> Sample:
        """Sample masks (N,) for flat logits (N,)."""
        mask = _bernoulli(logits, generator, self.antithetic)
        return Sample(mask, self.slope(logits, mask))

    def slope(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the slope (N,) for a given sample."""
        keep = torch.sigmoid(logits)
        halfway = (mask + torch.sigmoid(logits / self.temperature)) / 2
        return 2 * halfway * (1 - halfway) - keep * (1 - keep) / 2


@dataclass(frozen=True)
class StraightThrough:
    """First-order estimator: straight-through (arXiv 1308.3432).

        D ~ Bernoulli(p),   π = sigmoid(θ/τ),   slope = π (1 − π) / τ

    Exact for objectives that are linear in every bit, biased for others.
    """

    temperature: float = 1.0
    antithetic: bool = False

    def sample(self, logits: Tensor, generator: torch.Generator) -> Sample:
        """Sample masks (N,) for flat logits (N,)."""
        mask = _bernoulli(logits, generator, self.antithetic)
        return Sample(mask, self.slope(logits, mask))

    def slope(self, logits: Tensor, mask: Tensor) -> Tensor:
        """Return the slope (N,), the same for every sample."""
        soft = torch.sigmoid(logits / self.temperature)
        return soft * (1 - soft) / self.temperature


@dataclass(frozen=True)
class GumbelSigmoid:
    """Relaxed bits, hard in the forward pass (binary concrete, arXiv 1611.00712 and 1611.01144).

    g = ln u − ln(1 − u)              (the difference of two Gumbel variables)
    soft = sigmoid((θ + g) / τ),   D = 1 where soft > 1/2,   slope = soft (1 − soft) / τ
    """

    temperature: float = 1.0
    antithetic: bool = False

    def sample(self, logits: Tensor, generator: torch.Generator) -> Sample:
        """Sample masks (N,) for flat logits (N,)."""
        finfo = torch.finfo(logits.dtype)
        # Numbers u with finite ln u and ln(1 - u).
        uniform = _uniform(logits, generator, self.antithetic).clamp(finfo.tiny, 1.0 - finfo.eps / 2)
        noisy = logits + torch.logit(uniform)
        soft = torch.sigmoid(noisy / self.temperature)
        return Sample((noisy > 0).to(logits.dtype), soft * (1 - soft) / self.temperature)


@dataclass(frozen=True)
class OwnEstimator:
    """A custom estimator; type, shape and gradient of its masks are checked in every step."""

    draw: OwnFunction
    temperature: float

    def sample(self, logits: Tensor, generator: torch.Generator) -> Sample:
        """Sample masks for logits (N,) or (S, N); their gradient is the slope.

        Raises:
            DispfxError: if the result is not a mask of this shape with a gradient.
            SourceError: if the function raises.
        """
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            mask = self.draw(leaf, self.temperature, generator)
            if not isinstance(mask, Tensor):
                raise self._wrong(f"a {type(mask).__name__}")
            if mask.shape != leaf.shape or not mask.dtype.is_floating_point:
                raise self._wrong(
                    f"{str(mask.dtype).removeprefix('torch.')} of shape {tuple(mask.shape)}", leaf
                )
            if not mask.requires_grad:
                raise self._wrong("masks without a gradient")
            (slope,) = torch.autograd.grad(mask.sum(), leaf)
        return Sample(mask.detach().to(logits.dtype), slope)

    def check(self, logits: Tensor) -> None:
        """Draw once, with a separate generator, and check the values.

        Raises:
            DispfxError: if a mask is outside of [0, 1], or a slope is not finite.
        """
        sample = self.sample(logits, torch.Generator(logits.device).manual_seed(0))
        # hard + soft - soft rounds.
        if not bool(((sample.mask >= -_ROUNDING) & (sample.mask <= 1 + _ROUNDING)).all()):
            raise self._wrong(f"values from {float(sample.mask.min())} to {float(sample.mask.max())}")
        if not bool(sample.slope.isfinite().all()):
            raise self._wrong("masks whose gradient is not finite")

    def _wrong(self, found: str, logits: Tensor | None = None) -> DispfxError:
        shape = "of the shape of the logits" if logits is None else f"of shape {tuple(logits.shape)}"
        return DispfxError(
            f"{self.draw.name} must return masks in [0, 1] {shape} that have a gradient; it returned {found}",
            hint="a hard mask has a gradient as hard + soft - soft.detach()",
        )


ESTIMATORS: dict[str, Callable[[float, bool], Estimator]] = {
    "reinmax": ReinMax,
    "gumbel": GumbelSigmoid,
    "straight-through": StraightThrough,
}


def estimator(name: EstimatorName, temperature: float, *, antithetic: bool = False) -> Estimator:
    """Return the estimator of that name, or a custom one, which does not draw in pairs.

    Raises:
        DispfxError: if the name is unknown.
        SourceError: if a custom function cannot be loaded.
    """
    found = own_or_choice(ESTIMATORS, name, "estimator")
    return (
        OwnEstimator(found, temperature) if isinstance(found, OwnFunction) else found(temperature, antithetic)
    )


def _bernoulli(logits: Tensor, generator: torch.Generator, antithetic: bool) -> Tensor:
    return (_uniform(logits, generator, antithetic) < torch.sigmoid(logits)).to(logits.dtype)


def _uniform(logits: Tensor, generator: torch.Generator, antithetic: bool) -> Tensor:
    """Return uniform numbers in the shape of logits (N,) or (S, N); rows in pairs u, 1 - u if antithetic."""

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=logits.dtype, device=logits.device)

    if not antithetic or logits.dim() == 1:
        return drawn(logits.shape)
    samples, features = logits.shape
    first = drawn((-(-samples // 2), features))
    return torch.cat([first, 1.0 - first])[:samples]
