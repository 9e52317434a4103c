"""Widths that meet limits and remove as little as possible.

Rules:
1. The ratio is the smallest, at least the one that was asked for, whose widths take at most what every limit
   allows.  It is found by false position (Illinois method) on the tightest limit, so a few ratios are tried.
2. A head is a large step.  With the heads that stay, the ratio is searched once more, so that other features
   come back.
3. Limits that the dense decoder meets, and limits that even the least widths do not meet, are errors.  With a
   share of the KV cache of its own, the first are no errors: its heads go.

Entry point: `within_limits`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dispfx.errors import BudgetError
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.limit import Limit
from dispfx.plan.width_search import WidthSearch
from dispfx.words.constraint_text import in_unit, parse_constraint
from dispfx.words.option_names import option

# The widths of a search that come closest to a ratio.
AtRatio = Callable[[WidthSearch, float], Tensor]
# A limit that is taken up to this share is met closely.
_NEAR = 2e-4
_FINEST, _TRIES = 1e-4, 20


def within_limits(
    whole: WidthSearch, at: AtRatio, start_G: Tensor, sites: Sequence[Site], budget: Budget
) -> Tensor:
    """Return the widths of the smallest ratio that meets every limit of the count.

    Args:
        start_G: widths of the ratio that was asked for, or the largest ones.

    Raises:
        BudgetError: as rule 3 says.
    """
    limits = whole.count.limits
    if taken(whole, start_G) <= 1.0:
        if not budget.floor and budget.kv_ratio is None:
            raise _already_met(limits, _masks(whole, start_G))
        return start_G
    if taken(whole, whole.least) > 1.0:
        raise _out_of_reach(limits, _masks(whole, whole.least), sites, budget)
    found_G = _smallest(whole, at, budget.floor, start_G)
    heads_G = ~torch.tensor(whole.groups.aligned)
    if not bool(heads_G.any()) or budget.kv_ratio is not None:
        return found_G
    with_heads = replace(whole, held_G=heads_G, kept_G=found_G)
    start_G = at(with_heads, budget.floor)
    return start_G if taken(whole, start_G) <= 1.0 else _smallest(with_heads, at, budget.floor, start_G)


def taken(search: WidthSearch, widths_G: Tensor) -> float:
    """Return the largest share of a limit that widths take."""
    masks_N = _masks(search, widths_G)
    return max(limit.share_of(masks_N) for limit in search.count.limits)


def _masks(search: WidthSearch, widths_G: Tensor) -> Tensor:
    return search.groups.expand(search.ranking.masks(widths_G))


def _smallest(search: WidthSearch, at: AtRatio, low: float, start_G: Tensor) -> Tensor:
    """Return the widths of the smallest ratio above `low`, whose widths `start_G` take too much."""
    found_G = search.least
    high = 1.0 - search.count.count_kept(_masks(search, found_G)) / search.count.dense
    over_low, over_high = taken(search, start_G) - 1.0, taken(search, found_G) - 1.0
    spare = -over_high
    for _ in range(_TRIES):
        if high - low <= _FINEST or spare <= _NEAR:
            break
        middle = low + (high - low) * over_low / (over_low - over_high)
        middle = min(max(middle, low + _FINEST / 2), high - _FINEST / 2)
        widths_G = at(search, middle)
        over = taken(search, widths_G) - 1.0
        if over > 0.0:
            low, over_low, over_high = middle, over, over_high / 2
        else:
            high, over_high, over_low, found_G, spare = middle, over, over_low / 2, widths_G, -over
    if not torch.equal(found_G, search.least):
        return found_G
    # Branches that stay dense may leave more than the least widths.
    found_G = at(search, high)
    if taken(search, found_G) > 1.0:
        texts = ", ".join(limit.text for limit in search.count.limits)
        raise BudgetError(
            f"no ratio meets the constraints: {texts}, where branches that would become slower stay dense",
            hint=f"ask for more, or leave out {option('costs')}",
        )
    return found_G


def _already_met(limits: Sequence[Limit], masks_N: Tensor) -> BudgetError:
    return BudgetError(
        "the constraints are met without removing anything: "
        + ", ".join(
            f"{limit.text}, where it takes {in_unit(limit.text, limit.left_of(masks_N))}" for limit in limits
        ),
        hint=f"ask for less, or name a {option('ratio')} as well",
    )


def _out_of_reach(
    limits: Sequence[Limit], masks_N: Tensor, sites: Sequence[Site], budget: Budget
) -> BudgetError:
    missed = [limit for limit in limits if limit.share_of(masks_N) > 1.0]
    memory = any(parse_constraint(limit.text).kind == "memory" for limit in missed)
    without_heads = memory and all(site.kind != "heads" for site in sites)
    coarse = f"; widths are multiples of {budget.align}" if budget.align > 1 else ""
    return BudgetError(
        "the sites cannot meet a constraint: "
        + ", ".join(
            f"{limit.text}, where at least {in_unit(limit.text, limit.left_of(masks_N))} of "
            f"{in_unit(limit.text, limit.dense)} stay"
            for limit in missed
        )
        + coarse,
        hint="ask for no less than that"
        + (f", or prune heads as well: {option('sites', 'heads')}" if without_heads else ""),
    )
