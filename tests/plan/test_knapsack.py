"""The chosen moves are those that trying all combinations finds, and good features are never the price."""

from itertools import product

import pytest
import torch

from dispfx.ir.sites import Site, Slice
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import ParameterCount, harden
from dispfx.plan.knapsack import Goal, cheapest_moves


@pytest.mark.parametrize("seed", range(8))
def test_moves_are_those_of_trying_all(seed: int):
    generator = torch.Generator().manual_seed(seed)
    change_OG = torch.randint(-9, 10, (3, 5), generator=generator).double()
    cost_OG = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    cost_OG[0, seed % 5] = torch.inf
    goal = Goal(wanted=-13.0, within=1.0, resolution=1.0)

    def of(moves) -> tuple[float, float]:
        made = [(move - 1, group) for group, move in enumerate(moves) if move]
        change = sum(float(change_OG[place]) for place in made)
        return abs(change - goal.wanted), sum(float(cost_OG[place]) for place in made)

    every = [of(moves) for moves in product(range(4), repeat=5)]
    met = [cost for away, cost in every if away <= goal.within]
    chosen = [of(moves.tolist()) for moves in cheapest_moves(change_OG, cost_OG, goal)]
    assert chosen[0][0] <= goal.within
    assert chosen[0][1] == pytest.approx(min(met))
    assert chosen[-1] == (pytest.approx(min(every)[0]), pytest.approx(min(every)[1]))
    further = [of(moves.tolist()) for moves in cheapest_moves(change_OG, cost_OG, goal, 5)][1:]
    assert [away for away, _ in further] == sorted(away for away, _ in further) and len(further) == 5


def test_a_goal_out_of_reach_leaves_only_the_closest_moves():
    (closest,) = cheapest_moves(torch.tensor([[3.0, 4.0]]), torch.ones(1, 2), Goal(100.0, 1.0, 1.0))
    assert closest.tolist() == [1, 1]


@pytest.mark.parametrize("other", [(113, 127, 200, 330), (31, 37, 150, 170)])
def test_features_far_from_the_threshold_are_not_given_up_for_the_last_permille(other: tuple[int, ...]):
    # Steps of the groups whose features are clearly kept have the sizes that close a gap best.
    names, sizes = ("sure", "surer", "torn", "another"), (64, 64, 192, 192)
    sites = [
        Site(f"{name}.inner", name, "mlp", "inner", size, (Slice(name, 0),))
        for name, size in zip(names, sizes, strict=True)
    ]
    shapes = {name: (size, rest) for name, size, rest in zip(names, sizes, other, strict=True)}
    torn = torch.randn(384, generator=torch.Generator().manual_seed(0))
    logits = torch.cat((torch.full((64,), 6.0), torch.full((64,), 7.0), torn))
    count = ParameterCount.of_sites(sites, shapes)
    kept = harden(logits, sites, count, Budget(0.3, align=8))
    assert [len(indices) for indices in kept[:2]] == [64, 64]
