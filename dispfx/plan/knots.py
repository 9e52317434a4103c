"""The ratios that one run learns for: a single one, or a range with knots, between which logits are linear.

A run over a range draws a ratio for every mask.  Its logits are those of the two knots around it, mixed:

    logits(r)_N = Σ over K of weight_K(r) · logits_KN,    weight_K(r) the hat function of knot K,

and plans come from the order in which features cross the threshold (`dispfx.plan.family`).

Shapes: K knots, S samples, N features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Distance of two knots in a range: single runs a tenth apart keep features in nearly the same order.
_DISTANCE = 0.1


@dataclass(frozen=True)
class Knots:
    """One ratio, or several, evenly spaced and increasing."""

    ratios: tuple[float, ...]

    @staticmethod
    def of_range(low: float, high: float) -> "Knots":
        """Return evenly spaced knots from one ratio to another, about a tenth apart."""
        count = max(2, round((high - low) / _DISTANCE) + 1)
        spaced = [low + (high - low) * index / (count - 1) for index in range(count)]
        return Knots((*spaced[:-1], high))

    @property
    def is_range(self) -> bool:
        """Whether there is more than one ratio."""
        return len(self.ratios) > 1

    @property
    def range_text(self) -> str:
        """The range as it is asked for."""
        return f"{self.ratios[0]:g}:{self.ratios[-1]:g}"

    def drawn(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return ratios, (S,) float32 on the generator's device: one from every S-th part of the range."""
        low, high = self.ratios[0], self.ratios[-1]
        if not self.is_range:
            return torch.full((samples,), low, device=generator.device)
        part_S = torch.arange(samples, device=generator.device)
        within_S = torch.rand(samples, generator=generator, device=generator.device)
        return low + (high - low) * (part_S + within_S) / samples

    def weights(self, ratios_S: Tensor) -> Tensor:
        """Return the weight of every knot at given ratios within the range, (S, K), each row with sum 1."""
        if not self.is_range:
            return torch.ones_like(ratios_S)[:, None]
        last, (low, high) = len(self.ratios) - 1, (self.ratios[0], self.ratios[-1])
        place_S = ((ratios_S - low) * (last / (high - low))).clamp(0.0, last)
        knots_K = torch.arange(last + 1, device=ratios_S.device)
        return (1.0 - (place_S[:, None] - knots_K).abs()).clamp_min(0.0)


ONE_KNOT = Knots((0.0,))


def mixed(logits_KN: Tensor, weights_SK: Tensor) -> Tensor:
    """Return the logits of every sample, (S, N)."""
    return (weights_SK[:, :, None] * logits_KN).sum(1)


def unmixed(of_logits_SN: Tensor, weights_SK: Tensor) -> Tensor:
    """Return the gradient of the knots' logits, (K, N), given that of the samples' logits."""
    return (weights_SK[:, :, None] * of_logits_SN[:, None, :]).sum(0)
