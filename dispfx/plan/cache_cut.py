"""Which key/value heads go, so that a share of the KV cache goes with them.

Rules:
1. The heads with the smallest logits go, over all attentions, until no more than the share stays.  Every
   attention keeps its best head.
2. What rule 1 removed too much comes back, the largest logit first, as far as the share allows.  So the cache
   that stays is at most what was asked for, and one more head would be too much.
3. Attentions that keep equally many heads (`Groups.widths`) move together, by the mean of their logits.
4. The same logits always give the same heads.

Shapes: G groups, N features of all groups, U units, which are the heads of one rank that move together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.plan.class_widths import Ranking
from dispfx.plan.groups import Groups
from dispfx.plan.linear_count import LinearCount


@dataclass(frozen=True, eq=False)
class CacheCut:
    """The widths of the groups that hold heads.

    Args:
        of_heads_G: whether a feature of the group takes bytes of the cache.
        widths_G: that the cache share leaves; the size for all other groups.
        left: bytes per token that stay.
    """

    of_heads_G: Tensor
    widths_G: Tensor
    left: int


def cut_cache(ranking: Ranking, groups: Groups, cache: LinearCount, target: int) -> CacheCut:
    """Return the widths that leave at most `target` bytes per token, and as few bytes less as possible.

    Where even one head per attention is more than the target, that is what stays.

    Args:
        cache: of the groups' sites, on the CPU.
    """
    bytes_N = _bytes_of_groups(groups, cache)
    of_heads_G = torch.zeros(len(groups.sizes), dtype=torch.bool)
    of_heads_G[ranking.group_N[bytes_N > 0]] = True
    units = _units(ranking, groups, bytes_N, of_heads_G)
    gone_U = _gone(units, cache.dense - target)
    removed = units.class_U[gone_U]
    of_class_G = torch.tensor(groups.widths)
    fewer_G = torch.bincount(removed, minlength=int(of_class_G.max()) + 1)[of_class_G]
    widths_G = torch.tensor(groups.sizes) - torch.where(of_heads_G, fewer_G, 0)
    return CacheCut(of_heads_G, widths_G, cache.dense - round(float(units.bytes_U[gone_U].sum())))


@dataclass(frozen=True, eq=False)
class _Units:
    """Heads that move together, the first to go first: their class, rank within it, and bytes."""

    class_U: Tensor
    rank_U: Tensor
    bytes_U: Tensor


def _bytes_of_groups(groups: Groups, cache: LinearCount) -> Tensor:
    """Sum the bytes of the sites of a group, which share their features: (N,)."""
    feature_of = groups.expand(torch.arange(groups.features))
    return torch.zeros(groups.features, dtype=torch.float64).index_add(0, feature_of, cache.each_N)


def _units(ranking: Ranking, groups: Groups, bytes_N: Tensor, of_heads_G: Tensor) -> _Units:
    """Return the units that may go: all but the best one of each class."""
    heads_N = of_heads_G[ranking.group_N]
    class_N, rank_N = torch.tensor(groups.widths)[ranking.group_N][heads_N], ranking.rank_N[heads_N]
    most = int(max(groups.sizes))
    key_U, unit_N = (class_N * most + rank_N).unique(return_inverse=True)
    zero_U = torch.zeros(len(key_U), dtype=torch.float64)
    bytes_U = zero_U.index_add(0, unit_N, bytes_N[heads_N])
    logits_U = zero_U.index_add(0, unit_N, ranking.logits[heads_N]) / torch.bincount(unit_N)
    class_U, rank_U = key_U // most, key_U % most
    # Of equal logits, the one that is further back in its class goes first.
    order_U = torch.arange(len(key_U)).flip(0)
    order_U = order_U[logits_U[order_U].argsort(stable=True)]
    order_U = order_U[rank_U[order_U] > 0]
    return _Units(class_U[order_U], rank_U[order_U], bytes_U[order_U])


def _gone(units: _Units, excess: float) -> Tensor:
    """Return whether each unit goes, so that at least `excess` bytes do (rules 1 and 2)."""
    removed_U = units.bytes_U.cumsum(0)
    count = min(int((removed_U < excess).sum()) + (excess > 0), len(removed_U))
    gone_U = torch.arange(len(removed_U)) < count
    slack = float(removed_U[count - 1]) - excess if count else 0.0
    stuck = set[int]()
    for unit in range(count - 1, -1, -1):
        if slack <= 0:
            break
        own, of_class = float(units.bytes_U[unit]), int(units.class_U[unit])
        if own <= slack and of_class not in stuck:
            gone_U[unit], slack = False, slack - own
        else:
            stuck.add(of_class)  # only the best of what went may come back
    return gone_U
