"""What a plan keeps, and what two plans have in common, by series of selections.

The overlap of two selections is |A ∩ B| / |A ∪ B|, 1 if they are equal.  It is shown with the value for
random selections of the same widths, which have on average |A|·|B| / size features in common.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dispfx.errors import PlanMismatchError
from dispfx.plan.budget import Budget
from dispfx.plan.family import Family
from dispfx.plan.plan import CacheLeft, Met, Plan, Selection
from dispfx.report.layers import layers_of, mask_F
from dispfx.words.constraint_text import in_unit


@dataclass(frozen=True)
class SiteOverlap:
    """One site in two plans.

    Args:
        site: its name.
        size: number of features.
        first, second: how many each plan keeps.
        both: how many both keep.
    """

    site: str
    size: int
    first: int
    second: int
    both: int

    @property
    def overlap(self) -> float:
        """Features that both keep, divided by features that either keeps."""
        return self.both / (self.first + self.second - self.both)

    @property
    def by_chance(self) -> float:
        """The same, with the mean number of shared features of random selections."""
        both = self.first * self.second / self.size
        return both / (self.first + self.second - both)


@dataclass(frozen=True, eq=False)
class PlanDifference:
    """Two plans for one decoder.

    Args:
        first, second: the plans.
        sites: sites that both prune, in the first plan's order.
        only_first, only_second: names of sites that only one plan has.
    """

    first: Plan
    second: Plan
    sites: tuple[SiteOverlap, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def same_decoder(self) -> bool:
        """Whether both were made for the same weights."""
        return self.first.fingerprint == self.second.fingerprint


def plan_difference(first: Plan, second: Plan) -> PlanDifference:
    """Compare two plans site by site; sites are the same where they cut the same parameter axes.

    Raises:
        PlanMismatchError: if they have no site in common, or a site has different sizes.
    """
    others = {selection.keys: selection for selection in second.selections}
    pairs = [(one, others[one.keys]) for one in first.selections if one.keys in others]
    if not pairs:
        raise PlanMismatchError("the plans have no site in common, so they belong to different decoders")
    shared = {one.keys for one, _ in pairs}
    return PlanDifference(
        first,
        second,
        tuple(_overlap(one, other) for one, other in pairs),
        tuple(one.site for one in first.selections if one.keys not in shared),
        tuple(one.site for one in second.selections if one.keys not in shared),
    )


def _overlap(first: Selection, second: Selection) -> SiteOverlap:
    if first.size != second.size:
        raise PlanMismatchError(
            f"a site has {first.size} features in one plan and {second.size} in the other", where=first.site
        )
    both = int((mask_F(first) * mask_F(second)).sum())
    return SiteOverlap(first.site, first.size, len(first.kept), len(second.kept), both)


def plan_lines(plan: Plan) -> list[str]:
    """Return the header of a plan as text."""
    budget = plan.budget
    versions = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    begins = [f"learned from sequences that begin with token {' '.join(map(str, plan.bos))}"]
    return [
        f"{plan.achieved:.2%} of {budget.of} removed, {budget.ratio:.2%} requested; widths are multiples of "
        f"{budget.align}",
        *target_lines(plan.budget, plan.cache, plan.met),
        f"seed {plan.seed}, made with {versions or 'unknown versions'}, decoder {plan.fingerprint[:16]}",
        *(begins if plan.bos else []),
    ]


def target_lines(budget: Budget, cache: CacheLeft | None, met: Sequence[Met]) -> list[str]:
    """Return a line for each target besides the ratio: what was asked for, and what is left."""
    lines = []
    if budget.kv_ratio is not None and cache is not None:
        lines.append(
            f"KV cache: {cache.removed:.2%} removed, {budget.kv_ratio:.2%} requested; {cache.dense:,} → "
            f"{cache.pruned:,} bytes per token"
        )
    return lines + [
        f"{one.text}: {in_unit(one.text, one.dense)} → {in_unit(one.text, one.left)}" for one in met
    ]


def target_plain(budget: Budget, cache: CacheLeft | None, met: Sequence[Met]) -> dict[str, Any]:
    """Return the same, ready for JSON; empty where a budget has only a ratio."""
    plain: dict[str, Any] = {}
    if budget.kv_ratio is not None and cache is not None:
        plain["kv_ratio"] = {"requested": budget.kv_ratio, "achieved": cache.removed}
        plain["cache_bytes_per_token"] = {"dense": cache.dense, "pruned": cache.pruned}
    return plain | ({"constraints": [asdict(one) for one in met]} if met else {})


def family_lines(family: Family) -> list[str]:
    """Return the header of a family of plans as text."""
    return [
        f"plans for ratios from {family.range_text} of {family.plan.budget.of} ({len(family.order)} sites)",
        *plan_lines(family.plan),
    ]


def family_plain(family: Family) -> dict[str, Any]:
    """Return what a family of plans holds, ready for JSON: its range, and the plan of its largest ratio."""
    return {
        "ratios": [family.smallest, family.largest],
        "fingerprint": family.plan.fingerprint,
        "plan": plan_plain(family.plan),
    }


def plan_rows(plan: Plan) -> list[Sequence[str]]:
    """Return one row per series: number of sites, features kept, and the narrowest and widest site."""
    rows: list[Sequence[str]] = []
    for series in layers_of(plan).series:
        sites = [site for row in series.sites for site in row]
        kept, size = sum(len(site.kept) for site in sites), sum(site.size for site in sites)
        widths = [len(site.kept) for site in sites]
        rows.append(
            (
                f"{series.title} ({len(sites)} sites)",
                f"{kept:,} of {size:,}",
                f"{kept / size:.1%}",
                f"{min(widths):,} to {max(widths):,}",
            )
        )
    return rows


def plan_plain(plan: Plan) -> dict[str, Any]:
    """Return the whole plan, ready for JSON."""
    return {
        "fingerprint": plan.fingerprint,
        "ratio": {
            "requested": plan.budget.ratio,
            "achieved": plan.achieved,
            "of": plan.budget.of,
        },
        **target_plain(plan.budget, plan.cache, plan.met),
        "align": plan.budget.align,
        "select": plan.select,
        "seed": plan.seed,
        "versions": dict(plan.versions),
        "bos": list(plan.bos),
        "sites": [
            {"name": one.site, "symbol": one.symbol, "size": one.size, "kept": one.kept.tolist()}
            for one in plan.selections
        ],
    }


def difference_lines(difference: PlanDifference) -> list[str]:
    """Return a comparison of the plans as a whole."""
    first, second = difference.first, difference.second
    lines = [
        f"removed: {first.achieved:.2%} and {second.achieved:.2%} of {first.budget.of}"
        + ("" if first.budget.of == second.budget.of else f" and {second.budget.of}")
    ]
    if not difference.same_decoder:
        lines.append("the plans were made for decoders with different weights")
    lines += [
        f"only in the {which} plan: {', '.join(names)}"
        for which, names in (("first", difference.only_first), ("second", difference.only_second))
        if names
    ]
    same = sum(site.first == site.both == site.second for site in difference.sites)
    lines.append(f"{same} of {len(difference.sites)} sites keep exactly the same features")
    return lines


def difference_rows(difference: PlanDifference) -> list[Sequence[str]]:
    """Return one row per series: features kept by each plan, by both, overlap, and overlap by chance."""
    by_name = {site.site: site for site in difference.sites}
    rows: list[Sequence[str]] = []
    for series in layers_of(difference.first).series:
        names = [site.site for row in series.sites for site in row if site.site in by_name]
        sites = [by_name[name] for name in names]
        if sites:
            rows.append(_series_row(series.title, sites))
    rows.append(_series_row("all", difference.sites))
    return rows


def _series_row(title: str, sites: Sequence[SiteOverlap]) -> Sequence[str]:
    totals = [sum(values) for values in zip(*((s.first, s.second, s.both) for s in sites), strict=True)]
    mean = sum(site.overlap for site in sites) / len(sites)
    by_chance = sum(site.by_chance for site in sites) / len(sites)
    return (f"{title} ({len(sites)} sites)", *(f"{n:,}" for n in totals), f"{mean:.1%}", f"{by_chance:.1%}")


def difference_plain(difference: PlanDifference) -> dict[str, Any]:
    """Return every site's figures, ready for JSON."""
    return {
        "same_decoder": difference.same_decoder,
        "achieved": [difference.first.achieved, difference.second.achieved],
        "only_first": list(difference.only_first),
        "only_second": list(difference.only_second),
        "sites": [
            {
                "name": site.site,
                "size": site.size,
                "kept": [site.first, site.second],
                "both": site.both,
                "overlap": site.overlap,
                "by_chance": site.by_chance,
            }
            for site in difference.sites
        ],
    }
