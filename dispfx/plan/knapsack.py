"""Choose moves of groups whose changes have a given sum, at the least cost: a knapsack.

Every group stays or makes one of its moves.  Dynamic programming over the sum (Bellman 1957): after every
group, the least cost of each sum so far, and the move of that group with which it is reached.  Changes are
rounded to a resolution, so sums are few.

Shapes: G groups, O moves of a group, Z sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Goal:
    """What the changes should sum up to.

    Args:
        wanted: sum of the changes.
        within: how far from it a sum may be.
        resolution: changes are rounded to multiples of this.
    """

    wanted: float
    within: float
    resolution: float


def cheapest_moves(change_OG: Tensor, cost_OG: Tensor, goal: Goal, most: int = 1) -> Iterator[Tensor]:
    """Yield choices of moves, (G,) each: 0 for a group that stays, or its move, counted from 1.

    The first choice has the least cost of those whose changes meet the goal, if there are any.  After it come
    the sums closest to the goal, each at its least cost.

    Args:
        change_OG: of every move.
        cost_OG: of every move, at least 0; infinite for one that is not possible.
        goal: of the sum of changes.
        most: number of close sums.
    """
    steps_OG = (change_OG / goal.resolution).round().to(torch.int64)
    wanted = round(goal.wanted / goal.resolution)
    # Further away than the goal and two of the largest moves no sum helps.
    reach = abs(wanted) + 2 * int(steps_OG.abs().max())
    cost_Z = torch.full((2 * reach + 1,), torch.inf, dtype=torch.float64)
    cost_Z[reach] = 0.0
    taken: list[tuple[Tensor, list[int]]] = []
    for steps_O, cost_O in zip(steps_OG.T.tolist(), cost_OG.T.tolist(), strict=True):
        moves = [_shifted(cost_Z, *move) for move in zip(steps_O, cost_O, strict=True)]
        cost_Z, move_Z = torch.stack([cost_Z, *moves]).min(0)
        taken.append((move_Z, [0, *steps_O]))
    away_Z = (torch.arange(-reach, reach + 1) - wanted).abs().double()
    meets_Z = cost_Z.where(away_Z * goal.resolution <= goal.within, torch.inf)
    if bool(meets_Z.isfinite().any()):
        yield _traced(taken, int(meets_Z.argmin()))
    reached_Z = away_Z.where(cost_Z.isfinite(), torch.inf)
    for end in reached_Z.argsort(stable=True)[: min(most, int(cost_Z.isfinite().sum()))].tolist():
        yield _traced(taken, end)


def _shifted(cost_Z: Tensor, steps: int, cost: float) -> Tensor:
    """Return the cost of every sum if the last move changes it by so many steps, at a cost."""
    moved_Z = torch.full_like(cost_Z, torch.inf)
    if cost < torch.inf:
        to, start = slice(max(steps, 0), len(cost_Z) + min(steps, 0)), max(-steps, 0)
        moved_Z[to] = cost_Z[start : start + to.stop - to.start] + cost
    return moved_Z


def _traced(taken: Sequence[tuple[Tensor, list[int]]], end: int) -> Tensor:
    """Return the move of every group on the way to a sum, (G,)."""
    moves = []
    for move_Z, steps in reversed(taken):
        move = int(move_Z[end])
        moves.append(move)
        end -= steps[move]
    return torch.tensor(moves[::-1])
