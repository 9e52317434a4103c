"""Search for widths whose parameter count comes close to a target.

Starting from one threshold over all groups, `settled` moves widths by steps:

1. Single steps that bring the count closer, first the one that gives up the smallest logit margin per
   parameter.  The margin of a feature is the distance of its logit from the threshold.
2. If no single step helps: a step up of one group with a step down of another, the closest pair first.
3. If no pair helps and the count is not within `PROMISED` (few or wide groups): a step away of one group,
   the smallest margin first, which then stays while the remaining groups move as in 1 and 2.

Groups that keep equally many features (`Groups.widths`) move together, and start at the mean of their
threshold widths.

All orders are fixed, so the same logits give the same widths.  Shapes: G groups, N features of all
groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dispfx.plan.class_widths import Ranking, Widths
from dispfx.plan.groups import Groups
from dispfx.plan.parameter_count import ParameterCount

# Largest distance from the requested ratio, as a share of the dense count, if the widths allow it.
PROMISED = 0.001
# Share within which widths are left alone, so that the promise does not depend on the last step.
CLOSE = 0.0005
_PAIRS_TRIED = 32
_AWAY_TRIED = 16


@dataclass(frozen=True)
class WidthSearch:
    """The search for widths that leave `target` parameters.

    Args:
        ranking: the features that a group keeps at a width.
        widths: the allowed widths.
        groups: of sites.
        count: the number of remaining parameters, or one cost of the user.
        target: number of parameters that should remain.
        held_G: groups that do not move; none by default.
        kept_G: widths of the groups that do not move; all of their features by default.
    """

    ranking: Ranking
    widths: Widths
    groups: Groups
    count: ParameterCount
    target: float
    held_G: Tensor | None = None
    kept_G: Tensor | None = None

    def error(self, widths_G: Tensor) -> float:
        """Return the excess of the count over the target."""
        return self.count.count_kept(self.groups.expand(self.ranking.masks(widths_G))) - self.target

    def threshold(self) -> tuple[Tensor, float]:
        """Return the allowed widths nearest to the best global threshold, and that threshold."""
        low, high = 0, self.groups.features
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.error(self._at(middle)) <= 0 else (low, middle)
        taken = min((low, high), key=lambda kept: abs(self.error(self._at(kept))))
        return self._at(taken), self.ranking.threshold(taken)

    def settled(self, widths_G: Tensor, threshold: float) -> Tensor:
        """Return widths within `PROMISED` of the target, or the closest ones found."""
        best_G = self._descended(widths_G, threshold, self.free)
        while abs(self.error(best_G)) > PROMISED * self.count.dense:
            steps_away = self._away(best_G, threshold)
            others = (
                self._descended(away_G, threshold, (away_G == best_G) & self.free) for away_G in steps_away
            )
            closer_G = next((other_G for other_G in others if self._is_closer(other_G, best_G)), None)
            if closer_G is None:
                break
            best_G = closer_G
        return best_G

    def smallest_step(self, widths_G: Tensor) -> float:
        """Return the smallest number of parameters that one step of one group changes."""
        steps = [self.widths.above(widths_G), self.widths.below(widths_G)]
        changes = torch.cat([self._effect(widths_G, step_G, 0.0)[0].abs() for step_G in steps])
        return float(changes[changes > 0].min()) if bool((changes > 0).any()) else 0.0

    @cached_property
    def _class_G(self) -> Tensor:
        """For every group, the number of groups that move with it."""
        return torch.tensor(self.groups.widths)

    def _summed(self, values_G: Tensor) -> Tensor:
        """Return for every group the sum over the groups that move with it."""
        sums = values_G.new_zeros(len(values_G)).index_add(0, self._class_G, values_G)
        return sums[self._class_G]

    @property
    def free(self) -> Tensor:
        """Whether each group may move, (G,)."""
        every_G = torch.ones(len(self.widths.sizes), dtype=torch.bool)
        return every_G if self.held_G is None else ~self.held_G

    @property
    def held_widths(self) -> Tensor:
        """The width of each group if it does not move, (G,)."""
        return self.widths.full if self.kept_G is None else self.kept_G

    @property
    def least(self) -> Tensor:
        """The smallest widths that the search can find."""
        return torch.where(self.free, self.widths.smallest, self.held_widths)

    @property
    def most(self) -> Tensor:
        """The largest widths that the search can find."""
        return torch.where(self.free, self.widths.full, self.held_widths)

    def _at(self, kept: int) -> Tensor:
        widths_G = self.ranking.widths(kept)
        together_G = self._summed(torch.ones_like(widths_G))
        mean_G = (2 * self._summed(widths_G) + together_G) // (2 * together_G)
        nearest_G = self.widths.nearest(mean_G)
        return torch.where(self.free, nearest_G, self.held_widths)

    def _is_close(self, widths_G: Tensor) -> bool:
        return abs(self.error(widths_G)) <= CLOSE * self.count.dense

    def _is_closer(self, widths_G: Tensor, than_G: Tensor) -> bool:
        return abs(self.error(widths_G)) < abs(self.error(than_G))

    def _descended(self, widths_G: Tensor, threshold: float, free_G: Tensor) -> Tensor:
        """Move free groups by steps and pairs of steps while that helps."""
        while not self._is_close(widths_G):
            closer_G = self._closer(widths_G, threshold, free_G)
            if closer_G is None:
                break
            widths_G = closer_G
        return widths_G

    def _closer(self, widths_G: Tensor, threshold: float, free_G: Tensor) -> Tensor | None:
        error = self.error(widths_G)
        up_G = torch.where(free_G, self.widths.above(widths_G), widths_G)
        down_G = torch.where(free_G, self.widths.below(widths_G), widths_G)
        for candidates in (self._singles, self._pairs):
            for candidate_G in candidates(up_G, widths_G, down_G, threshold, error):
                # Estimates ignore that two axes of one weight may move together, so the exact count decides.
                if self._is_closer(candidate_G, widths_G):
                    return candidate_G
        return None

    def _singles(
        self, up_G: Tensor, widths_G: Tensor, down_G: Tensor, threshold: float, error: float
    ) -> Iterator[Tensor]:
        next_G = down_G if error > 0 else up_G
        change_G, margin_G = self._effect(widths_G, next_G, threshold)
        closer_G = ((change_G + error).abs() < abs(error)) & (next_G != widths_G)
        price_G = torch.where(closer_G, margin_G / change_G.abs().clamp_min(1.0), torch.inf)
        for group in price_G.argsort(stable=True)[: int(closer_G.sum())].tolist():
            yield self._moved(widths_G, next_G, group)

    def _pairs(
        self, up_G: Tensor, widths_G: Tensor, down_G: Tensor, threshold: float, error: float
    ) -> Iterator[Tensor]:
        gained_G, _ = self._effect(widths_G, up_G, threshold)
        lost_G, _ = self._effect(widths_G, down_G, threshold)
        error_GG = (gained_G[:, None] + lost_G[None, :] + error).abs()
        # A group cannot move up and down at once, or past its limits.
        error_GG[self._class_G[:, None] == self._class_G[None, :]] = torch.inf
        error_GG[up_G == widths_G, :] = torch.inf
        error_GG[:, down_G == widths_G] = torch.inf
        errors, order = error_GG.flatten().sort(stable=True)
        promising = order[errors < abs(error)][:_PAIRS_TRIED].tolist()
        for up, down in (divmod(index, len(widths_G)) for index in promising):
            yield self._moved(self._moved(widths_G, up_G, up), down_G, down)

    def _away(self, widths_G: Tensor, threshold: float) -> Iterator[Tensor]:
        """Yield widths with one group moved, in either direction, smallest margin per parameter first."""
        next_2G = torch.stack((self.widths.above(widths_G), self.widths.below(widths_G)))
        effects = [self._effect(widths_G, next_G, threshold) for next_G in next_2G]
        price_2G = torch.stack([margin_G / change_G.abs().clamp_min(1.0) for change_G, margin_G in effects])
        price_2G[(next_2G == widths_G) | ~self.free] = torch.inf
        prices, order = price_2G.flatten().sort(stable=True)
        for index in order[prices.isfinite()][:_AWAY_TRIED].tolist():
            direction, group = divmod(index, len(widths_G))
            yield self._moved(widths_G, next_2G[direction], group)

    def _effect(self, widths_G: Tensor, next_G: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return the change of the count and the given-up logit margin if one group moves alone.

        The count is linear in one group's masks unless a weight has two axes in the group.
        """
        with torch.enable_grad():  # callers often measure with gradients off
            masks = self.ranking.masks(widths_G).requires_grad_()
            self.count.count(self.groups.expand(masks)).backward()
        assert masks.grad is not None
        change_G = self.ranking.sums_between(masks.grad, widths_G, next_G)
        margin_G = -self.ranking.sums_between(self.ranking.logits - threshold, widths_G, next_G)
        return self._summed(change_G), self._summed(margin_G)

    def _moved(self, widths_G: Tensor, next_G: Tensor, group: int) -> Tensor:
        """Return the widths after a step of a group and of those that move with it."""
        return torch.where(self._class_G == self._class_G[group], next_G, widths_G)
