"""An upper limit on something that the masks decide, such as the bytes of a decoder."""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

# Sums of large numbers are rounded.
_ROUNDING = 1e-9


class Counter(Protocol):
    """Something that masks (N,) or (S, N) of all sites decide, differentiable in them."""

    def count(self, masks: Tensor) -> Tensor:
        """Return it, a scalar or (S,)."""
        ...

    def to(self, device: torch.device | str) -> Self:
        """Return the same with its tables on a device."""
        ...


@dataclass(frozen=True, eq=False)
class Limit:
    """The sum of some counters, and how much it may be.

    Args:
        text: of the constraint.
        dense: what the dense decoder takes, in bytes or seconds.
        most: what is allowed.
        parts: that are summed.
    """

    text: str
    dense: float
    most: float
    parts: tuple[Counter, ...]

    def to(self, device: torch.device | str) -> "Limit":
        """Return the same limit with its tables on `device`."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))

    def left(self, masks: Tensor) -> Tensor:
        """Return what masks leave, a scalar or (S,), differentiable in them."""
        return torch.stack([part.count(masks) for part in self.parts]).sum(0)

    def left_of(self, masks_N: Tensor) -> float:
        """Return what hard masks leave; bytes as a whole number."""
        left = float(self.left(masks_N.detach()))
        return round(left) if isinstance(self.dense, int) else left

    def share_of(self, masks_N: Tensor) -> float:
        """Return the share of what is allowed that hard masks leave; 1 or less meets the limit."""
        return self.left_of(masks_N) / (self.most * (1.0 + _ROUNDING))
