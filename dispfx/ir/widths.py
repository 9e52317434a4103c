"""Orders of features and widths of groups, the two things that hardening moves.

Within a group the features with the largest logits are kept, so a plan is fully given by one width
a group.  Everything here is one tensor operation over all groups at a time.

Shapes: G groups, N features of all groups, side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Widths:
    """The widths a group may have: multiples of `align` up to its size, and its size.

    Args:
        sizes: number of features of every group.
        align: a group with fewer features than this keeps all of them.
    """

    sizes: tuple[int, ...]
    align: int

    @property
    def full(self) -> Tensor:
        """The size of every group."""
        return torch.tensor(self.sizes)

    @property
    def smallest(self) -> Tensor:
        """The least allowed width of every group; never zero."""
        return self.full.clamp_max(self.align)

    def nearest(self, widths_G: Tensor) -> Tensor:
        """Return the closest allowed widths; the larger of two equally close."""
        lower_G = torch.maximum(widths_G // self.align * self.align, self.smallest)
        upper_G = torch.minimum(lower_G + self.align, self.full)
        nearer_G = torch.where(upper_G - widths_G <= widths_G - lower_G, upper_G, lower_G)
        return torch.where(widths_G >= self.full, self.full, nearer_G)

    def above(self, widths_G: Tensor) -> Tensor:
        """Return the next larger allowed widths; a full group stays."""
        return torch.minimum((widths_G // self.align + 1) * self.align, self.full)

    def below(self, widths_G: Tensor) -> Tensor:
        """Return the next smaller allowed widths; a group at its least stays."""
        return torch.maximum((widths_G - 1) // self.align * self.align, self.smallest)


@dataclass(frozen=True)
class Ranking:
    """The order of all features by their logits, within groups and over all of them.

    Equal logits are ordered by position, so the same logits always give the same order.

    Args:
        sizes: number of features of every group.
        logits: (N,) float64.
        order_N: all features, the largest logit first.
        group_N: the group of every feature.
        rank_N: how many features of its own group come before a feature.
        by_rank_N: features group by group, each group's best first.
        starts_G: where a group begins.
    """

    sizes: tuple[int, ...]
    logits: Tensor
    order_N: Tensor
    group_N: Tensor
    rank_N: Tensor
    by_rank_N: Tensor
    starts_G: Tensor

    @staticmethod
    def of(logits: Tensor, sizes: Sequence[int]) -> "Ranking":
        """Rank flat logits (N,) of groups of the given sizes."""
        sizes_G = torch.tensor(list(sizes))
        group_N = torch.repeat_interleave(torch.arange(len(sizes_G)), sizes_G)
        starts_G = sizes_G.cumsum(0) - sizes_G
        order_N = logits.argsort(descending=True, stable=True)
        by_rank_N = order_N[group_N[order_N].argsort(stable=True)]
        rank_N = torch.empty_like(by_rank_N)
        rank_N[by_rank_N] = torch.arange(len(logits)) - starts_G[group_N]
        return Ranking(tuple(sizes), logits, order_N, group_N, rank_N, by_rank_N, starts_G)

    def widths(self, kept: int) -> Tensor:
        """Return the width of every group when the `kept` best features of all stay, and one a group."""
        groups = self.group_N[self.order_N[:kept]]
        return torch.bincount(groups, minlength=len(self.sizes)).clamp_min(1)

    def threshold(self, kept: int) -> float:
        """Return the logit halfway between the last feature that stays and the first that goes."""
        edge = self.order_N[max(kept - 1, 0) : kept + 1]
        return float(self.logits[edge].mean())

    def masks(self, widths_G: Tensor) -> Tensor:
        """Return flat float64 masks (N,) that keep the best features of every group."""
        return (self.rank_N < widths_G[self.group_N]).to(torch.float64)

    def sums_between(self, values_N: Tensor, from_G: Tensor, to_G: Tensor) -> Tensor:
        """Return for every group the signed sum of values of the features that a change of width moves."""
        zero = values_N.new_zeros(1)
        running = torch.cat((zero, values_N[self.by_rank_N].cumsum(0)))
        return running[self.starts_G + to_G] - running[self.starts_G + from_G]

    def selections(self, widths_G: Tensor) -> list[Tensor]:
        """Return the sorted int32 indices that every group keeps."""
        masks = self.masks(widths_G).split(list(self.sizes))
        return [mask.nonzero().flatten().to(torch.int32) for mask in masks]
