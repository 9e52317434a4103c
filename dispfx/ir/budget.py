"""From logits to the features that are kept, so that the budget is met.

Hardening draws no random number (the same logits always give the same selections):

1. **Threshold.**  One threshold for all sites; bisection over the sorted logits finds where the
   aligned widths come closest to the budget.  Every site keeps at least its best feature.
2. **Align.**  A width becomes the nearest multiple of `budget.align`, or the full width; within a
   site the features with the largest logits stay.
3. **Repair.**  While the count is off by more than `CLOSE`, one site moves by one step of its
   width.  Of the moves that bring the count closer, the one that gives up the least logit margin a
   parameter is taken; when none does, the best pair of one step up and one step down.

Entry points: `ParameterCount` (how many parameters are left), `check_reachable`, `harden`,
`hard_masks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.errors import BudgetError, PassError
from dispfx.ir.count import ParameterCount
from dispfx.ir.groups import Groups
from dispfx.ir.plan import Budget
from dispfx.ir.sites import Site
from dispfx.ir.widths import Ranking, Widths

__all__ = ["CLOSE", "LIMIT", "Groups", "ParameterCount", "check_reachable", "hard_masks", "harden"]

# Share of the dense count within which repair leaves the thresholded widths alone: half of the
# 0.001 that a user is promised, so that the promise does not hang on the last move.
CLOSE = 0.0005
# Share by which a plan may miss the asked ratio before it is an error.
LIMIT = 0.005
_PAIRS_TRIED = 32


def hard_masks(
    sites: Sequence[Site], kept: Sequence[Tensor], *, device: torch.device | str | None = None
) -> Tensor:
    """Return the flat mask vector over all sites: 1.0 where a feature is kept, else 0.0 (float32).

    Args:
        kept: the kept indices of every site.
        device: where the masks live; by default where the indices do.
    """
    masks = []
    for site, indices in zip(sites, kept, strict=True):
        mask = torch.zeros(site.size, device=indices.device if device is None else device)
        mask[indices.to(mask.device, torch.int64)] = 1.0
        masks.append(mask)
    return torch.cat(masks)


def harden(
    logits: Tensor,
    sites: Sequence[Site],
    count: ParameterCount,
    budget: Budget,
    *,
    groups: Groups | None = None,
) -> list[Tensor]:
    """Return the sorted int32 indices that every site keeps, on the CPU.

    Args:
        logits: flat, one a feature of every group (of every site without `groups`), in order.
        count: of the same sites, with the budget's `of`.
        groups: sites that share a selection; each site its own by default.

    Raises:
        BudgetError: if the sites cannot give up that much, or no widths come within 0.005 of the
            ratio (with alignment: within 0.005 and half a step of the widths).
        PassError: if the logits do not fit the sites or are not finite.
    """
    groups = Groups.alone(sites) if groups is None else groups
    search = _Search.of(logits, groups, count, budget)
    search.check_reachable(budget)
    widths = search.repaired(*search.threshold(budget), budget)
    selections = search.ranking.selections(widths)
    return [selections[group].clone() for group in groups.of_site]


def check_reachable(
    sites: Sequence[Site], count: ParameterCount, budget: Budget, *, groups: Groups | None = None
) -> None:
    """Say before anything is learned that a budget cannot be met.

    Raises:
        BudgetError: if even the smallest widths leave too much, with the largest possible ratio.
    """
    groups = Groups.alone(sites) if groups is None else groups
    _Search.of(torch.zeros(groups.features), groups, count, budget).check_reachable(budget)


def _check(logits: Tensor, groups: Groups, count: ParameterCount, budget: Budget) -> None:
    if logits.shape != (groups.features,):
        raise PassError(f"{groups.features} logits were expected, one a feature, found {tuple(logits.shape)}")
    if not bool(logits.isfinite().all()):
        raise PassError("logits must be finite to be hardened")
    if count.of != budget.of:
        raise PassError(f"the budget counts {budget.of} and the parameter count counts {count.of}")
    if not 0.0 <= budget.ratio < 1.0 or budget.align < 1:
        raise BudgetError(
            f"a ratio in [0, 1) and an alignment of at least 1 were expected, found {budget.ratio} and "
            f"{budget.align}"
        )


@dataclass(frozen=True)
class _Search:
    """Widths whose count comes close to a target.  G groups; N features of all groups."""

    ranking: Ranking
    widths: Widths
    groups: Groups
    count: ParameterCount

    @staticmethod
    def of(logits: Tensor, groups: Groups, count: ParameterCount, budget: Budget) -> "_Search":
        """Return a search on the CPU, in float64."""
        logits = logits.detach().to("cpu", torch.float64)
        _check(logits, groups, count, budget)
        widths = Widths(groups.sizes, budget.align)
        return _Search(Ranking.of(logits, groups.sizes), widths, groups.to("cpu"), count.to("cpu"))

    def left(self, widths_G: Tensor) -> int:
        """Count the parameters that are left at these widths."""
        return self.count.count_kept(self.groups.expand(self.ranking.masks(widths_G)))

    def check_reachable(self, budget: Budget) -> None:
        """Refuse a budget that even the smallest widths exceed."""
        most = 1.0 - self.left(self.widths.smallest) / self.count.dense
        if most < budget.ratio - LIMIT:
            raise _out_of_reach(budget, most)

    def threshold(self, budget: Budget) -> tuple[Tensor, float]:
        """Return the aligned widths at the best global threshold, and that threshold."""
        target = budget.keep * self.count.dense
        low, high = 0, self.groups.features
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.left(self._at(middle)) <= target else (low, middle)
        taken = min((low, high), key=lambda kept: abs(self.left(self._at(kept)) - target))
        return self._at(taken), self.ranking.threshold(taken)

    def _at(self, kept: int) -> Tensor:
        return self.widths.nearest(self.ranking.widths(kept))

    def repaired(self, widths_G: Tensor, threshold: float, budget: Budget) -> Tensor:
        """Move single steps, then pairs of steps, until the count is close or nothing helps.

        Raises:
            BudgetError: if the count stays too far away.
        """
        target = budget.keep * self.count.dense
        error = self.left(widths_G) - target
        while abs(error) > CLOSE * self.count.dense:
            moved = self._closer(widths_G, threshold, error, target)
            if moved is None:
                break
            widths_G, error = moved
        step = self._smallest_step(widths_G) if budget.align > 1 else 0.0
        if abs(error) > LIMIT * self.count.dense + step / 2:
            raise _not_met(budget, 1.0 - (target + error) / self.count.dense)
        return widths_G

    def _closer(
        self, widths_G: Tensor, threshold: float, error: float, target: float
    ) -> tuple[Tensor, float] | None:
        for candidates in (self._singles, self._pairs):
            for candidate_G in candidates(widths_G, threshold, error):
                # Estimates ignore that two axes of one weight may move, so the exact count decides.
                exact = self.left(candidate_G) - target
                if abs(exact) < abs(error):
                    return candidate_G, exact
        return None

    def _singles(self, widths_G: Tensor, threshold: float, error: float) -> list[Tensor]:
        """Return widths one step closer, the cheapest margin a parameter first."""
        next_G = self.widths.below(widths_G) if error > 0 else self.widths.above(widths_G)
        change_G, margin_G = self._effect(widths_G, next_G, threshold)
        closer_G = ((change_G + error).abs() < abs(error)) & (next_G != widths_G)
        price_G = torch.where(closer_G, margin_G / change_G.abs().clamp_min(1.0), torch.inf)
        order = price_G.argsort(stable=True)[: int(closer_G.sum())].tolist()
        return [_replaced(widths_G, {group: next_G[group]}) for group in order]

    def _pairs(self, widths_G: Tensor, threshold: float, error: float) -> list[Tensor]:
        """Return widths with one group a step up and another a step down, the closest first."""
        up_G, down_G = self.widths.above(widths_G), self.widths.below(widths_G)
        gained_G, _ = self._effect(widths_G, up_G, threshold)
        lost_G, _ = self._effect(widths_G, down_G, threshold)
        error_GG = (gained_G[:, None] + lost_G[None, :] + error).abs()
        # A group cannot move up and down at once, nor past its limits.
        error_GG.fill_diagonal_(torch.inf)
        error_GG[up_G == widths_G, :] = torch.inf
        error_GG[:, down_G == widths_G] = torch.inf
        best = error_GG.flatten().argsort(stable=True)[:_PAIRS_TRIED].tolist()
        pairs = [divmod(index, len(widths_G)) for index in best if error_GG.flatten()[index] < abs(error)]
        return [_replaced(widths_G, {up: up_G[up], down: down_G[down]}) for up, down in pairs]

    def _effect(self, widths_G: Tensor, next_G: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Return the change of the count and the logit margin given up if one group moves alone.

        The count is linear in one group's masks as long as no weight has two axes in the group.
        """
        masks = self.ranking.masks(widths_G).requires_grad_()
        self.count.count(self.groups.expand(masks)).backward()
        assert masks.grad is not None
        change_G = self.ranking.sums_between(masks.grad, widths_G, next_G)
        margin_G = -self.ranking.sums_between(self.ranking.logits - threshold, widths_G, next_G)
        return change_G, margin_G

    def _smallest_step(self, widths_G: Tensor) -> float:
        steps = [self.widths.above(widths_G), self.widths.below(widths_G)]
        changes = torch.cat([self._effect(widths_G, step_G, 0.0)[0].abs() for step_G in steps])
        return float(changes[changes > 0].min()) if bool((changes > 0).any()) else 0.0


def _replaced(widths_G: Tensor, changes: dict[int, Tensor]) -> Tensor:
    moved_G = widths_G.clone()
    for group, width in changes.items():
        moved_G[group] = width
    return moved_G


def _out_of_reach(budget: Budget, most: float) -> BudgetError:
    aligned = f" at widths that are multiples of {budget.align}" if budget.align > 1 else ""
    return BudgetError(
        f"ratio {budget.ratio:.4f} of the {budget.of} parameters was asked, and the sites can give up at "
        f"most {most:.4f}{aligned}",
        hint="ask for a smaller ratio"
        + (", a smaller alignment" if aligned else "")
        + (", or count blocks only" if budget.of == "total" else ""),
    )


def _not_met(budget: Budget, reached: float) -> BudgetError:
    return BudgetError(
        f"ratio {budget.ratio:.4f} of the {budget.of} parameters was asked, and the closest widths "
        f"(multiples of {budget.align}) remove {reached:.4f}",
        hint="ask for that ratio, or for a smaller alignment",
    )
