"""From logits to kept features that meet the budget.

Hardening is deterministic (the same logits always give the same selections):

1. **Threshold.**  One threshold for all sites; bisection over the sorted logits finds where the
   aligned widths are closest to the budget.  Every site keeps at least its best feature.
2. **Align.**  A width becomes the nearest multiple of `budget.align`, or the full width; within a site the
   features with the largest logits stay.  If experts have their own features, the width is per expert.
3. **Repair.**  While the count is off by more than `CLOSE`, the moves of widths that bring it there at the
   smallest cost in logits are made (`WidthSearch.settled`).
4. **Never slower.**  With a latency table, branches that would be slower when cut keep all of their features,
   and the remaining branches are settled again, until no branch is slower.  Constraints of time know the time
   of the whole decoder, so with one of them every branch is cut.
5. **Cache.**  With a share of the KV cache to remove, the heads that stay are chosen first
   (`dispfx.plan.cache_cut`), and all other sites meet the ratio by rules 1 to 4.

6. **Constraints.**  With limits, the ratio is the smallest at which rules 1 to 5 give widths that meet all of
   them (`dispfx.plan.limit_search`).  It is never less than the ratio that was asked for.

Entry points: `ParameterCount` (number of remaining parameters), `check_reachable`, `harden`,
`hard_masks`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dispfx.errors import BudgetError, PassError
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.cache_cut import CacheCut, cut_cache
from dispfx.plan.class_widths import Ranking, Widths
from dispfx.plan.decoder_count import count_of
from dispfx.plan.groups import Groups
from dispfx.plan.latency_table import LatencyTable, branch_costs
from dispfx.plan.limit_search import within_limits
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
            ratio (with alignment: within 0.005 and half a step of the widths), or the heads cannot remove the
            share of the cache.
        PassError: if the logits do not fit the sites or are not finite.
    """
    groups = Groups.alone(sites) if groups is None else groups
    whole = _search(logits, groups, count, budget)
    if count.limits:
        aimed = replace(whole, target=(1.0 - budget.floor) * count.dense)
        start_G = _at_ratio(aimed, sites, replace(budget, ratio=budget.floor)) if budget.floor else whole.most
        nearest = partial(_nearest, sites=sites, costs=budget.costs_of_branches)
        widths_G = within_limits(whole, nearest, start_G, sites, budget)
    else:
        widths_G = _at_ratio(whole, sites, budget, in_order=in_order)
    selections = whole.ranking.selections(widths_G)
    return [selections[group].clone() for group in groups.of_site]


def fitting_budget(budget: Budget, program: Program, *, constrained: bool) -> Budget:
    """Return the budget with the ratio that its constraints need if all features matter equally.

    Without constraints it is returned as it is.

    Args:
        constrained: as in the settings of learning.

    Raises:
        BudgetError: as `harden`, or if the dense decoder meets the constraints.
    """
    if not budget.constraints:
        return budget
    count, groups = count_of(budget, program), Groups.of_run(program.sites, constrained=constrained)
    kept = harden(torch.zeros(groups.features), program.sites, count, budget, groups=groups)
    left = count.count_kept(hard_masks(program.sites, kept))
    return budget.removing(1.0 - left / count.dense)


def _at_ratio(whole: WidthSearch, sites: Sequence[Site], budget: Budget, *, in_order: bool = False) -> Tensor:
    """Return the widths that meet the ratio (rules 1 to 5); `in_order` as for `harden`.

    Raises:
        BudgetError: if no widths meet them.
    """
    widths_G = whole.held_widths
    for search in _parts(whole):
        _check_reachable(search, budget)
        own_G = search.free
        if in_order:
            found_G, _ = search.threshold()
        else:
            search, found_G = _never_slower(search, sites, budget.costs_of_branches)
            if not _is_met(search, found_G, budget):
                raise _not_met(budget, 1.0 - (search.target + search.error(found_G)) / search.count.dense)
        widths_G = torch.where(own_G, found_G, widths_G)
    return widths_G


def _nearest(
    whole: WidthSearch, ratio: float, *, sites: Sequence[Site], costs: LatencyTable | None
) -> Tensor:
    """Return the widths that come closest to a ratio."""
    whole = replace(whole, target=(1.0 - ratio) * whole.count.dense)
    widths_G = whole.held_widths
    for search in _parts(whole):
        found_G = _never_slower(search, sites, costs)[1]
        widths_G = torch.where(search.free, found_G, widths_G)
    return widths_G


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
    return [
        replace(whole, count=one, held_G=~(acts_G & whole.free))
        for one, acts_G in zip(counts, acts_PG, strict=True)
    ]


def _never_slower(
    search: WidthSearch, sites: Sequence[Site], costs: LatencyTable | None
) -> tuple[WidthSearch, Tensor]:
    """Return the search with slower branches kept dense, and its widths.

    Heads that the share of the cache leaves stay as they are.
    """
    groups = search.groups
    of_site = torch.tensor(groups.of_site)
    while True:
        widths_G = search.settled(*search.threshold())
        if costs is None:
            return search, widths_G
        masks = groups.expand(search.ranking.masks(widths_G)).split([site.size for site in sites])
        found = branch_costs(costs, sites, search.count.shapes, masks)
        movable = {
            site.branch for site, group in zip(sites, groups.of_site, strict=True) if search.free[group]
        }
        slower = [cost for cost in found if cost.is_slower and cost.name in movable]
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
            If the ratio and the share of the cache exclude each other, with what can be reached.
    """
    groups = Groups.alone(sites) if groups is None else groups
    if count.limits:
        harden(torch.zeros(groups.features), sites, count, budget, groups=groups)
        return
    generator = torch.Generator().manual_seed(0)
    tried = [torch.zeros(groups.features)]
    tried += [torch.randn(groups.features, generator=generator) for _ in range(_RANDOM_TRIES)]
    for searches in zip(*(_parts(_search(logits, groups, count, budget)) for logits in tried), strict=True):
        first = searches[0]
        _check_reachable(first, budget)
        if first.smallest_step(first.most) <= 2 * LIMIT * first.count.dense:
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
    groups, count = groups.to("cpu"), count.to("cpu")
    search = WidthSearch(ranking, widths, groups, count, budget.keep * count.dense)
    if budget.kv_ratio is None:
        return search
    cut = _cache_cut(search, budget)
    return replace(search, held_G=cut.of_heads_G, kept_G=cut.widths_G)


def _cache_cut(search: WidthSearch, budget: Budget) -> CacheCut:
    """Return the heads that a share of the cache leaves.

    Raises:
        BudgetError: if they cannot remove it.
    """
    cache = search.count.cache
    if cache is None:
        raise PassError("a budget with a share of the cache needs a count of the cache")
    asked, target = f"a share of {budget.kv_ratio:.4f} of the KV cache", budget.cache_left(cache.dense)
    cut = cut_cache(search.ranking, search.groups, cache, target)
    if not bool(cut.of_heads_G.any()):
        raise BudgetError(
            f"{asked} was requested, but no key/value head can be removed",
            hint=f"capture the decoder with {option('sites', 'heads')}; `dispfx inspect` then says why heads "
            "stay",
        )
    if cut.left > target:
        raise BudgetError(
            f"{asked} was requested, but every attention keeps a head, so at most "
            f"{1.0 - cut.left / cache.dense:.4f} can be removed",
            hint=f"ask for a smaller {option('kv_ratio')}",
        )
    return cut


def _check_reachable(search: WidthSearch, budget: Budget) -> None:
    least, most = (
        1.0 - (search.target + search.error(widths_G)) / search.count.dense
        for widths_G in (search.most, search.least)
    )
    if most < budget.ratio - LIMIT:
        raise _out_of_reach(budget, most)
    if budget.kv_ratio is not None and least > budget.ratio + LIMIT:
        raise BudgetError(
            f"ratio {budget.ratio:.4f} of {budget.counted} was requested, but the heads of a share of "
            f"{budget.kv_ratio:.4f} of the KV cache alone are {least:.4f}",
            hint=f"ask for a ratio of at least {math.ceil(least * 1e4) / 1e4:.4f}, or a smaller "
            f"{option('kv_ratio')}",
        )


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
    if budget.kv_ratio is not None:
        aligned += f", with the heads that stay at a KV ratio of {budget.kv_ratio:.4f}"
    return BudgetError(
        f"ratio {budget.ratio:.4f} of {budget.counted} was requested, but the sites can remove "
        f"at most {most:.4f}{aligned}",
        hint="ask for a smaller ratio"
        + (f", a smaller {option('align')}" if budget.align > 1 else "")
        + (f", a larger {option('kv_ratio')}" if budget.kv_ratio is not None else "")
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
