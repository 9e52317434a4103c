"""Search for widths whose parameter count comes close to a target.

Starting from one threshold over all groups, `settled` moves widths by a few steps.  The margin of a feature
is the distance of its logit from the threshold, and that of a move the sum over its features.  Of all moves
that bring the count within `CLOSE`, those that give up the smallest margin are taken, and the closest ones if
none do (`dispfx.plan.knapsack`).  Two axes of one weight may move together, so the exact count decides, and
the search goes on from there.

Groups that keep equally many features (`Groups.widths`) move together, and start at the mean of their
threshold widths.

All orders are fixed, so the same logits give the same widths.  Shapes: G groups, N features of all groups,
O moves of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from dispfx.plan.class_widths import Ranking, Widths
from dispfx.plan.groups import Groups
from dispfx.plan.knapsack import Goal, cheapest_moves
from dispfx.plan.parameter_count import ParameterCount

# Largest distance from the requested ratio, as a share of the dense count, if the widths allow it.
PROMISED = 0.001
# Share within which widths are left alone, so that the promise does not depend on the last step.
CLOSE = 0.0005
# Sums of changes are told apart to this share of `CLOSE`.
_RESOLUTION = 0.25
# Sums of changes, and pairs of steps, that are tried where the exact count is not what single changes say.
_TRIED = 256
# Steps up and down that a move may have: two, and more if few groups share the work.
_FEWEST, _MOST, _OF_ALL = 2, 16, 256


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
        while not self._is_close(widths_G):
            found = self._moved(widths_G, threshold)
            closer_G = next((one_G for one_G in found if self._is_closer(one_G, widths_G)), None)
            if closer_G is None:
                break
            widths_G = closer_G
        return widths_G

    def smallest_step(self, widths_G: Tensor) -> float:
        """Return the smallest number of parameters that one step of one group changes."""
        ways_OG = torch.stack((self.widths.above(widths_G), self.widths.below(widths_G)))
        change_OG, _ = self._effects(widths_G, ways_OG, 0.0)
        changes = change_OG.abs()[change_OG != 0]
        return float(changes.min()) if len(changes) else 0.0

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

    def _moved(self, widths_G: Tensor, threshold: float) -> Iterator[Tensor]:
        """Yield the widths after the cheapest moves that come close, and after those of the closest sums.

        Moves of groups that cut one weight change less together than alone.  So where the cheapest moves come
        no closer, many sums, shorter moves, and at last pairs of steps are tried.
        """
        groups_G, first_G = torch.arange(len(widths_G)), self._first_G
        close, error = CLOSE * self.count.dense, self.error(widths_G)
        steps = max(_FEWEST, min(_MOST, _OF_ALL // len(widths_G)))
        while steps:
            ways_OG = self._ways(widths_G, steps)
            change_OG, margin_OG = self._effects(widths_G, ways_OG, threshold)
            moves_OG = self.free & (first_G == groups_G) & (change_OG != 0)
            chosen = cheapest_moves(
                change_OG.where(moves_OG, 0.0),
                margin_OG.clamp_min(0.0).where(moves_OG, torch.inf),
                Goal(-error, close, max(1.0, _RESOLUTION * close)),
                _TRIED,
            )
            all_OG = torch.cat((widths_G[None], ways_OG))
            yield from (all_OG.gather(0, way_G[first_G][None])[0] for way_G in chosen)
            steps //= 2
        yield from self._pairs(widths_G, error)

    @cached_property
    def _first_G(self) -> Tensor:
        """For every group, the first of those that move with it, which stands for them."""
        groups_G = torch.arange(len(self._class_G))
        first_G = torch.full_like(groups_G, len(groups_G))
        return first_G.scatter_reduce(0, self._class_G, groups_G, "amin")[self._class_G]

    def _pairs(self, widths_G: Tensor, error: float) -> Iterator[Tensor]:
        """Yield the widths after steps of two groups, first those whose changes bring the count closest."""
        ways_OG = self._ways(widths_G, 1)
        change_OG, _ = self._effects(widths_G, ways_OG, 0.0)
        groups = [group for group in self._first_G.unique().tolist() if bool(self.free[group])]
        alone = [(float(change_OG[way, group]), way, group) for way in (0, 1) for group in groups]
        pairs = [(one, other) for one, other in combinations(alone, 2) if one[2] != other[2]]
        pairs.sort(key=lambda pair: abs(error + pair[0][0] + pair[1][0]))
        for pair in pairs[:_TRIED]:
            next_G = widths_G
            for _, way, group in pair:
                next_G = torch.where(self._class_G == self._class_G[group], ways_OG[way], next_G)
            yield next_G

    def _ways(self, widths_G: Tensor, steps: int) -> Tensor:
        """Return the widths after up to so many steps up, and down, (O, G)."""
        ways = []
        for step in (self.widths.above, self.widths.below):
            way_G = widths_G
            for _ in range(steps):
                way_G = step(way_G)
                ways.append(way_G)
        return torch.stack(ways)

    def _effects(self, widths_G: Tensor, ways_OG: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return the change of the count and the given-up logit margin of every move alone, (O, G) each.

        The count is linear in one group's masks unless a weight has two axes in the group.
        """
        with torch.enable_grad():  # callers often measure with gradients off
            masks = self.ranking.masks(widths_G).requires_grad_()
            self.count.count(self.groups.expand(masks)).backward()
        assert masks.grad is not None
        margins_N = threshold - self.ranking.logits
        of_values = [
            [self._summed(self.ranking.sums_between(values_N, widths_G, way_G)) for way_G in ways_OG]
            for values_N in (masks.grad, margins_N)
        ]
        change_OG, margin_OG = (torch.stack(values) for values in of_values)
        return change_OG, margin_OG
