"""Order of features and widths of groups, for hardening.

Within a group the features with the largest logits are kept, so one width per group determines a plan.  In a
group whose features belong to several experts, the width is per expert: all experts keep equally many
features, each its own best.  Everything here is a tensor operation over all groups.

Shapes: G groups, N features of all groups, side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Widths:
    """The allowed widths of groups: multiples of `align` up to the size, and the size.

    Args:
        sizes: number of features of every group; per expert if there are several.
        align: a group with fewer features than this keeps all of them.
        aligned: whether `align` holds for a group; a group for which it does not may have any width.
    """

    sizes: tuple[int, ...]
    align: int
    aligned: tuple[bool, ...]

    @property
    def full(self) -> Tensor:
        """The size of every group."""
        return torch.tensor(self.sizes)

    @cached_property
    def step(self) -> Tensor:
        """The alignment of every group, at most the largest size."""
        step = min(self.align, max(self.sizes, default=1))
        return torch.tensor([step if aligned else 1 for aligned in self.aligned])

    @property
    def smallest(self) -> Tensor:
        """The least allowed width of every group; never zero."""
        return torch.minimum(self.full, self.step)

    def nearest(self, widths_G: Tensor) -> Tensor:
        """Return the closest allowed widths; the larger of two equally close."""
        lower_G = torch.maximum(widths_G // self.step * self.step, self.smallest)
        upper_G = torch.minimum(lower_G + self.step, self.full)
        nearer_G = torch.where(upper_G - widths_G <= widths_G - lower_G, upper_G, lower_G)
        return torch.where(widths_G >= self.full, self.full, nearer_G)

    def above(self, widths_G: Tensor) -> Tensor:
        """Return the next larger allowed widths; a full group stays."""
        return torch.minimum((widths_G // self.step + 1) * self.step, self.full)

    def below(self, widths_G: Tensor) -> Tensor:
        """Return the next smaller allowed widths; a group at its minimum stays."""
        return torch.maximum((widths_G - 1) // self.step * self.step, self.smallest)


@dataclass(frozen=True)
class Ranking:
    """The order of all features by their logits, within groups and over all of them.

    Equal logits are ordered by position, so the same logits always give the same order.

    Args:
        sizes: number of features of every group.
        experts_G: number of experts that the features of a group belong to.
        logits: (N,) float64.
        order_N: all features, the largest logit first.
        group_N: the group of every feature.
        rank_N: position of a feature in the order of its group and expert.
        by_rank_N: features group by group, best first, those of equal rank adjacent.
        starts_G: start of every group.
    """

    sizes: tuple[int, ...]
    experts_G: Tensor
    logits: Tensor
    order_N: Tensor
    group_N: Tensor
    rank_N: Tensor
    by_rank_N: Tensor
    starts_G: Tensor

    @staticmethod
    def of(logits: Tensor, sizes: Sequence[int], experts: Sequence[int] | None = None) -> "Ranking":
        """Rank flat logits (N,) of groups with the given sizes and numbers of experts (one by default)."""
        sizes_G = torch.tensor(list(sizes))
        experts_G = torch.ones_like(sizes_G) if experts is None else torch.tensor(list(experts))
        group_N = torch.repeat_interleave(torch.arange(len(sizes_G)), sizes_G)
        starts_G = sizes_G.cumsum(0) - sizes_G
        order_N = logits.argsort(descending=True, stable=True)
        # A run holds the features of one expert in one group.
        each_R = torch.repeat_interleave(sizes_G // experts_G, experts_G)
        run_N = torch.repeat_interleave(torch.arange(len(each_R)), each_R)
        by_run_N = order_N[run_N[order_N].argsort(stable=True)]
        rank_N = torch.empty_like(by_run_N)
        rank_N[by_run_N] = torch.arange(len(logits)) - (each_R.cumsum(0) - each_R)[run_N]
        by_rank_N = by_run_N[rank_N[by_run_N].argsort(stable=True)]
        by_rank_N = by_rank_N[group_N[by_rank_N].argsort(stable=True)]
        return Ranking(tuple(sizes), experts_G, logits, order_N, group_N, rank_N, by_rank_N, starts_G)

    def widths(self, kept: int) -> Tensor:
        """Return the width of every group if the `kept` best features stay, and at least one per group.

        For experts, the mean number that they keep is rounded.
        """
        groups = self.group_N[self.order_N[:kept]]
        counts_G = torch.bincount(groups, minlength=len(self.sizes))
        return ((counts_G + self.experts_G // 2) // self.experts_G).clamp_min(1)

    def threshold(self, kept: int) -> float:
        """Return the logit halfway between the last kept and the first removed feature."""
        edge = self.order_N[max(kept - 1, 0) : kept + 1]
        return float(self.logits[edge].mean())

    def masks(self, widths_G: Tensor) -> Tensor:
        """Return flat float64 masks (N,) that keep the best features of every group."""
        return (self.rank_N < widths_G[self.group_N]).to(torch.float64)

    def sums_between(self, values_N: Tensor, from_G: Tensor, to_G: Tensor) -> Tensor:
        """Return for every group the signed sum of values of the features that a new width affects."""
        zero = values_N.new_zeros(1)
        running = torch.cat((zero, values_N[self.by_rank_N].cumsum(0)))
        to_end_G, from_end_G = (self.starts_G + self.experts_G * width_G for width_G in (to_G, from_G))
        return running[to_end_G] - running[from_end_G]

    def selections(self, widths_G: Tensor) -> list[Tensor]:
        """Return the sorted int32 indices that every group keeps."""
        masks = self.masks(widths_G).split(list(self.sizes))
        return [mask.nonzero().flatten().to(torch.int32) for mask in masks]
