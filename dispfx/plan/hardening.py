"""From logits to kept features that meet the budget.

Hardening is deterministic (the same logits always give the same selections):

1. **Threshold.**  One threshold for all sites; bisection over the sorted logits finds where the
   aligned widths are closest to the budget.  Every site keeps at least its best feature.
2. **Align.**  A width becomes the nearest multiple of `budget.align`, or the full width; within a site the
   features with the largest logits stay.  If experts have their own features, the width is per expert.
3. **Repair.**  While the count is off by more than `CLOSE`, the moves of widths that bring it there at the
   smallest cost in logits are made (`WidthSearch.settled`).
4. **Never slower.**  With a latency table, branches that would be slower when cut keep all of their features,
   and the remaining branches are settled again, until no branch is slower.

Entry points: `ParameterCount` (number of remaining parameters), `check_reachable`, `harden`,
`hard_masks`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dispfx.errors import BudgetError, PassError
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.class_widths import Ranking, Widths
from dispfx.plan.groups import Groups
from dispfx.plan.latency_table import LatencyTable, branch_costs
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.width_search import CLOSE, WidthSearch
from dispfx.words.option_names import option
from dispfx.words.own_function import shown

__all__ = ["CLOSE", "LIMIT", "Groups", "ParameterCount", "check_reachable", "hard_masks", "harden"]

# Largest allowed distance from the requested ratio.
LIMIT = 0.005
# Rankings of the features that are tried before learning, where steps are large.
_RANDOM_TRIES = 3


def hard_masks(
    sites: Sequence[Site], kept: Sequence[Tensor], *, device: torch.device | str | None = None
) -> Tensor:
    """Return the flat mask vector over all sites: 1.0 if a feature is kept, else 0.0 (float32).

    Args:
        kept: the kept indices of every site.
        device: of the masks; by default that of the indices.
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
    in_order: bool = False,
) -> list[Tensor]:
    """Return the sorted int32 indices that every site keeps, on the CPU.

    Args:
        logits: flat, one per feature of every group (of every site without `groups`), in order.
        count: of the same sites, with the budget's `of`.
        groups: sites that share a selection; by default every site has its own.
        in_order: leave out the repair, so that a larger ratio keeps nothing that a smaller one removes.  The
            ratio is then met up to half a step of one width.

    Raises:
        BudgetError: if the sites cannot meet the ratio, or no widths come within 0.005 of the
            ratio (with alignment: within 0.005 and half a step of the widths).
        PassError: if the logits do not fit the sites or are not finite.
    """
    groups = Groups.alone(sites) if groups is None else groups
    whole = _search(logits, groups, count, budget)
    widths_G = whole.widths.full
    for search in _parts(whole):
        _check_reachable(search, budget)
        own_G = search.free
        if in_order:
            found_G, _ = search.threshold()
        else:
            search, found_G = _never_slower(search, sites, groups, budget.costs)
            if not _is_met(search, found_G, budget):
                raise _not_met(budget, 1.0 - (search.target + search.error(found_G)) / count.dense)
        widths_G = torch.where(own_G, found_G, widths_G)
    selections = whole.ranking.selections(widths_G)
    return [selections[group].clone() for group in groups.of_site]


def _parts(whole: WidthSearch) -> list[WidthSearch]:
    """Return one search for every number that must meet the ratio, over the groups that it depends on.

    Raises:
        BudgetError: if two numbers depend on one group.
    """
    counts = whole.count.parts()
    if whole.count.own is None:
        return [whole]
    sizes = list(whole.groups.sizes)
    acts_PG = torch.stack(
        [
            torch.stack([of_group.any() for of_group in (one.slopes(whole.groups) != 0).split(sizes)])
            for one in counts
        ]
    )
    if bool((acts_PG.sum(0) > 1).any()):
        raise BudgetError(
            f"two of the numbers of {shown(whole.count.of)} depend on one selection, "
            "so they cannot meet the ratio separately",
            hint="return one number for what shares a selection",
        )
    return [replace(whole, count=one, held_G=~acts_G) for one, acts_G in zip(counts, acts_PG, strict=True)]


def _never_slower(
    search: WidthSearch, sites: Sequence[Site], groups: Groups, costs: LatencyTable | None
) -> tuple[WidthSearch, Tensor]:
    """Return the search with slower branches kept dense, and its widths."""
    of_site = torch.tensor(groups.of_site)
    while True:
        widths_G = search.settled(*search.threshold())
        if costs is None:
            return search, widths_G
        masks = search.groups.expand(search.ranking.masks(widths_G)).split([site.size for site in sites])
        found = branch_costs(costs, sites, search.count.shapes, masks)
        slower = [cost for cost in found if cost.is_slower]
        if not slower:
            return search, widths_G
        # One at a time: keeping this branch dense cuts other branches more, which may make them faster.
        worst = max(slower, key=lambda cost: cost.pruned_seconds / cost.dense_seconds)
        held_G = torch.zeros(len(widths_G), dtype=torch.bool)
        held_G[of_site[torch.tensor([site.branch == worst.name for site in sites])]] = True
        held_G = held_G if search.held_G is None else held_G | search.held_G
        search = replace(search, held_G=held_G)


def check_reachable(
    sites: Sequence[Site], count: ParameterCount, budget: Budget, *, groups: Groups | None = None
) -> None:
    """Check before learning that a budget can be met.

    Raises:
        BudgetError: if even the smallest widths leave too many parameters, with the largest possible ratio.
            If no widths come close to the ratio, as where few heads alone count, with the closest ratio.
    """
    groups = Groups.alone(sites) if groups is None else groups
    generator = torch.Generator().manual_seed(0)
    tried = [torch.zeros(groups.features)]
    tried += [torch.randn(groups.features, generator=generator) for _ in range(_RANDOM_TRIES)]
    for searches in zip(*(_parts(_search(logits, groups, count, budget)) for logits in tried), strict=True):
        first = searches[0]
        _check_reachable(first, budget)
        if first.smallest_step(first.widths.full) <= 2 * LIMIT * first.count.dense:
            continue  # Steps are so small that some widths are close.
        found = [search.settled(*search.threshold()) for search in searches]
        if not any(_is_met(first, widths_G, budget) for widths_G in found):
            error = min((first.error(widths_G) for widths_G in found), key=abs)
            raise _not_met(budget, 1.0 - (first.target + error) / first.count.dense)


def _is_met(search: WidthSearch, widths_G: Tensor, budget: Budget) -> bool:
    """Whether widths are close to the ratio: within `LIMIT`, and with alignment half a step."""
    step = search.smallest_step(widths_G) if budget.align > 1 else 0.0
    return abs(search.error(widths_G)) <= LIMIT * search.count.dense + step / 2


def _search(logits: Tensor, groups: Groups, count: ParameterCount, budget: Budget) -> WidthSearch:
    _check(logits, groups, count, budget)
    ranking = Ranking.of(logits.detach().to("cpu", torch.float64), groups.sizes, groups.experts)
    expert_sizes = tuple(size // experts for size, experts in zip(groups.sizes, groups.experts, strict=True))
    widths = Widths(expert_sizes, budget.align, groups.aligned)
    return WidthSearch(ranking, widths, groups.to("cpu"), count.to("cpu"), budget.keep * count.dense)


def _check_reachable(search: WidthSearch, budget: Budget) -> None:
    most = 1.0 - (search.target + search.error(search.widths.smallest)) / search.count.dense
    if most < budget.ratio - LIMIT:
        raise _out_of_reach(budget, most)


def _check(logits: Tensor, groups: Groups, count: ParameterCount, budget: Budget) -> None:
    if logits.shape != (groups.features,):
        raise PassError(
            f"one logit per feature ({groups.features}) was expected, found {tuple(logits.shape)}"
        )
    if not bool(logits.isfinite().all()):
        raise PassError("logits must be finite to be hardened")
    if count.of != budget.of:
        raise PassError(f"the budget counts {shown(budget.of)}, but the count counts {shown(count.of)}")


def _out_of_reach(budget: Budget, most: float) -> BudgetError:
    aligned = f" at widths that are multiples of {budget.align}" if budget.align > 1 else ""
    return BudgetError(
        f"ratio {budget.ratio:.4f} of {budget.counted} was requested, but the sites can remove "
        f"at most {most:.4f}{aligned}",
        hint="ask for a smaller ratio"
        + (f", a smaller {option('align')}" if aligned else "")
        + (", or count blocks only" if budget.of == "total" else ""),
    )


def _not_met(budget: Budget, reached: float) -> BudgetError:
    return BudgetError(
        f"ratio {budget.ratio:.4f} of {budget.counted} was requested, but the closest widths "
        f"(multiples of {budget.align}) remove {reached:.4f}",
        hint="ask for that ratio" + (f", or for a smaller {option('align')}" if budget.align > 1 else ""),
    )


def removal_order(
    logits_KN: Tensor,
    sites: Sequence[Site],
    count: ParameterCount,
    budgets: Sequence[Budget],
    *,
    groups: Groups,
) -> Tensor:
    """Return one number per feature, (N,): the ratio at which its logit crosses the threshold.

    Logits and threshold are linear between two ratios.  A feature that is kept at the largest ratio has that
    ratio and the distance of its logit from the threshold; one that is removed at the smallest ratio has less
    than that.  Hardened in this order (`in_order`), a larger ratio keeps nothing that a smaller one removes.

    Args:
        logits_KN: of all groups at increasing ratios.
        budgets: with these ratios.
    """
    above_KN = torch.stack(
        [
            logits_N.double().cpu() - _search(logits_N, groups, count, budget).threshold()[1]
            for logits_N, budget in zip(logits_KN, budgets, strict=True)
        ]
    )
    ratios = [budget.ratio for budget in budgets]
    order_N = ratios[-1] + above_KN[-1].clamp_min(0.0)
    # From the last interval to the first, so that the first crossing counts.
    for index in range(len(ratios) - 2, -1, -1):
        before_N, after_N = above_KN[index], above_KN[index + 1]
        share_N = before_N / (before_N - after_N).clamp_min(1e-12)
        crossed_N = ratios[index] + (ratios[index + 1] - ratios[index]) * share_N
        order_N = crossed_N.where((before_N >= 0) & (after_N < 0), order_N)
    return (ratios[0] + above_KN[0]).where(above_KN[0] < 0, order_N)
