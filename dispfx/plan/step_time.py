"""The time of a whole step of a decoder, as a function of its masks.

    t(s) = linear between measured points of (parameters left, seconds), continued at both ends
           - c · share of the KV cache that is removed

The points are times of whole pruned decoders (`dispfx costs`), so what does not shrink, and what selecting
features costs, is part of them.  The dense decoder selects nothing, so it is no point.

Legend: K points, S samples of the masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispfx.plan.latency_table import StepTimes
from dispfx.plan.linear_count import LinearCount
from dispfx.plan.parameter_count import ParameterCount

# A step takes some time even if nearly nothing is left.
_LEAST_SHARE = 1e-3


@dataclass(frozen=True, eq=False)
class StepTime:
    """Seconds of one step.

    Args:
        parameters: the number that is left, of all.
        cache: bytes per token, if heads can be removed.
        points_K: parameters of the measured decoders, rising.
        seconds_K: of each.
        cache_seconds: that a step without a cache would save.
        dense: seconds of the dense decoder.
    """

    parameters: ParameterCount
    cache: LinearCount | None
    points_K: Tensor
    seconds_K: Tensor
    cache_seconds: float
    dense: float

    @staticmethod
    def of(times: StepTimes, parameters: ParameterCount, cache: LinearCount | None) -> "StepTime":
        """Return the time of a step of a decoder from what was measured on it."""
        points_K, seconds_K = (
            torch.tensor(values, dtype=torch.float64) for values in (times.parameters, times.seconds)
        )
        return StepTime(parameters, cache, points_K, seconds_K, times.cache_seconds, times.dense_seconds)

    def to(self, device: torch.device | str) -> "StepTime":
        """Return the same with its tables on `device`."""
        return replace(
            self,
            parameters=self.parameters.to(device),
            cache=None if self.cache is None else self.cache.to(device),
            points_K=self.points_K.to(device),
            seconds_K=self.seconds_K.to(device),
        )

    def count(self, masks: Tensor) -> Tensor:
        """Return the seconds, a scalar or (S,), differentiable in the masks (N,) or (S, N)."""
        seconds = _between(self.points_K, self.seconds_K, self.parameters.count(masks))
        if self.cache is not None and self.cache_seconds:
            seconds = seconds - self.cache_seconds * (1.0 - self.cache.count(masks) / self.cache.dense)
        return seconds.clamp_min(_LEAST_SHARE * self.dense)


def _between(points_K: Tensor, seconds_K: Tensor, left: Tensor) -> Tensor:
    upper = torch.bucketize(left.detach(), points_K).clamp(1, len(points_K) - 1)
    low, high = points_K[upper - 1], points_K[upper]
    fast, slow = seconds_K[upper - 1], seconds_K[upper]
    return fast + (slow - fast) * (left - low) / (high - low)


def seconds_at(times: StepTimes, parameters: int) -> float:
    """Return the time of a decoder with all of its cache that has so many parameters."""
    points_K, seconds_K = (
        torch.tensor(values, dtype=torch.float64) for values in (times.parameters, times.seconds)
    )
    return float(_between(points_K, seconds_K, torch.tensor(parameters, dtype=torch.float64)))


def rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the closest times that never fall: larger decoders are not faster (isotonic regression).

    Neighbours that fall are replaced by their mean (pool adjacent violators, Ayer et al. 1955).
    """
    pools: list[tuple[float, int]] = []  # mean, and of how many
    for mean in seconds:
        own = (mean, 1)
        while pools and pools[-1][0] > own[0]:
            last = pools.pop()
            number = last[1] + own[1]
            own = ((last[0] * last[1] + own[0] * own[1]) / number, number)
        pools.append(own)
    return tuple(mean for mean, number in pools for _ in range(number))
