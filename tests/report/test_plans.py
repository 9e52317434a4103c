"""What plans keep, and keep alike."""

from dataclasses import replace

import pytest
import torch

from dispfx.errors import PlanMismatchError
from dispfx.plan.budget import Budget
from dispfx.plan.plan import CacheLeft, Selection
from dispfx.report.plans import (
    SiteOverlap,
    difference_lines,
    difference_rows,
    plan_difference,
    plan_lines,
    plan_plain,
    plan_rows,
)
from tests.report.runs import plan_of


def of_selections(*selections: Selection):
    return replace(plan_of(), selections=selections)


def selection(name: str, size: int, *kept: int) -> Selection:
    return Selection(name, size, torch.tensor(kept, dtype=torch.int32), (f"{name}:0",))


def test_a_plan_says_what_it_leaves_of_the_cache():
    plan = replace(plan_of(), cache=CacheLeft(2048, 1024), budget=Budget(0.3, kv_ratio=0.4))
    assert plan_lines(plan)[1] == "KV cache: 50.00% removed, 40.00% requested; 2,048 → 1,024 bytes per token"
    assert plan_plain(plan)["kv_ratio"] == {"requested": 0.4, "achieved": 0.5}
    assert not any("cache" in line for line in plan_lines(plan_of())) and "kv_ratio" not in plan_plain(
        plan_of()
    )


def test_a_plan_differs_from_itself_in_nothing():
    difference = plan_difference(plan_of(), plan_of())
    assert all(site.overlap == 1.0 for site in difference.sites)
    assert "15 of 15 sites keep exactly the same features" in difference_lines(difference)


def test_the_overlap_counts_shared_features_over_those_of_any():
    first, second = (
        of_selections(selection("a.read", 8, 0, 1, 2)),
        of_selections(selection("a.read", 8, 1, 2, 3, 4)),
    )
    (site,) = plan_difference(first, second).sites
    assert site == SiteOverlap("a.read", 8, 3, 4, 2)
    assert site.overlap == 2 / 5 and site.by_chance == pytest.approx(1.5 / 5.5)


def test_sites_of_one_plan_alone_are_named_and_unlike_weights_too():
    shared = selection("a.read", 4, 0)
    first = of_selections(shared, selection("b.read", 4, 1))
    second = replace(of_selections(shared, selection("c.read", 4, 1)), fingerprint="0" * 8)
    difference = plan_difference(first, second)
    assert (difference.only_first, difference.only_second) == (("b.read",), ("c.read",))
    said = "\n".join(difference_lines(difference))
    assert "only in the first plan: b.read" in said and "different weights" in said


def test_plans_of_different_decoders_are_refused():
    with pytest.raises(PlanMismatchError, match="no site in common"):
        plan_difference(of_selections(selection("a.read", 4, 0)), of_selections(selection("b.read", 4, 0)))
    with pytest.raises(PlanMismatchError, match="4 features in one plan and 5"):
        plan_difference(of_selections(selection("a.read", 4, 0)), of_selections(selection("a.read", 5, 0)))


def test_rows_come_by_series_with_their_sums():
    rows = plan_rows(plan_of())
    assert [row[0].split(":")[0] for row in rows] == ["S1", "S2", "S3", "S4", "S5"]
    assert rows[0][1:] == ("21 of 36", "58.3%", "7 to 7")
    last = difference_rows(plan_difference(plan_of(), plan_of(1)))[-1]
    assert last[:3] == ("all (15 sites)", "117", "117")
