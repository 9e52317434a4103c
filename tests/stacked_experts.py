"""Mixtures of stacked experts in plain torch, each with its way to find a token's expert.

y = Σ over the two experts e of a token of p_e · down_e(relu(up_e(x)))
"""

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401  (brings a grouped product in float32)
from torch import Tensor, nn

from tests.one_branch import WIDTH, one_branch

EXPERTS, EACH, CHOSEN = 4, 8, 2

grouped_product = torch.ops.transformers.grouped_mm_fallback
Way = Callable[["Experts", Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Two stacks of weights and a router; `way` computes them for tokens (T, D) and their experts (T, 2)."""

    def __init__(self, way: Way, *, bias: bool = False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, EACH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, EACH, WIDTH) / EACH**0.5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, EACH)) if bias else None
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        chances, ids = self.router(rows).softmax(-1).topk(CHOSEN, dim=-1)
        each = self.way(self, rows, ids)
        return (each.view(-1, CHOSEN, WIDTH) * chances[..., None]).sum(1).view(x.shape)


def gathered(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """Gather the matrices of every token's experts."""
    number = ids.reshape(-1)
    h = torch.bmm(rows.repeat_interleave(CHOSEN, 0)[:, None], m.up[number])
    if m.up_bias is not None:
        h = h + m.up_bias[number][:, None]
    return torch.bmm(h.relu(), m.down[number])[:, 0]


def _sorted(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    number, order = torch.sort(ids.reshape(-1))
    return rows[order // CHOSEN], number, order


def _unsorted(y: Tensor, order: Tensor) -> Tensor:
    return y[torch.argsort(order)]


def in_runs(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """Sort tokens by expert; the ends of the runs are the running sum of counts of the sorted numbers."""
    taken, number, order = _sorted(rows, ids)
    counts = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends)
    if m.up_bias is not None:
        h = h + m.up_bias[number]
    return _unsorted(grouped_product(h.relu(), m.down, ends), order)


def in_bounded_runs(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """The same with numbers that are brought into range before the bias is gathered."""
    taken, number, order = _sorted(rows, ids)
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends)
    if m.up_bias is not None:
        h = h + m.up_bias[number.clamp(0, EXPERTS - 1)]
    return _unsorted(grouped_product(h.relu(), m.down, ends), order)


def in_wrongly_bounded_runs(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: the last expert's tokens get the bias of the one before."""
    taken, number, order = _sorted(rows, ids)
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends)
    assert m.up_bias is not None
    h = h + m.up_bias[number.clamp(max=EXPERTS - 2)]
    return _unsorted(grouped_product(h.relu(), m.down, ends), order)


def in_gathered_runs(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """The same with numbers that are gathered by the order of a sort."""
    order = torch.argsort(ids.reshape(-1))
    number = ids.reshape(-1)[order]
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(rows[order // CHOSEN], m.up, ends)
    if m.up_bias is not None:
        h = h + m.up_bias[number]
    return _unsorted(grouped_product(h.relu(), m.down, ends), order)


def in_runs_of_unknown_numbers(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """Ends of runs that nobody counted from sorted numbers: they alone say whose a position is."""
    taken, number, order = _sorted(rows, ids)
    counts = (number[:, None] == torch.arange(EXPERTS)).sum(0)
    ends = counts.cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends)
    if m.up_bias is not None:
        h = h + m.up_bias[number]
    return _unsorted(grouped_product(h.relu(), m.down, ends), order)


def all_of_them(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """Compute every expert for every token, then take the chosen ones."""
    h = torch.bmm(rows.expand(EXPERTS, -1, -1), m.up).relu()
    every = torch.bmm(h, m.down).transpose(0, 1)
    return every[torch.arange(rows.shape[0])[:, None], ids].reshape(-1, WIDTH)


def by_two_routers(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: the second product takes the matrix of another expert than the first."""
    number = ids.reshape(-1)
    h = torch.bmm(rows.repeat_interleave(CHOSEN, 0)[:, None], m.up[number]).relu()
    return torch.bmm(h, m.down[ids.flip(-1).reshape(-1)])[:, 0]


def in_falling_runs(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: the bias is gathered by numbers that fall, so they are not those of the runs."""
    order = torch.argsort(ids.reshape(-1), descending=True)
    number = ids.reshape(-1)[order]
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(rows[order // CHOSEN], m.up, ends)
    assert m.up_bias is not None
    return _unsorted(grouped_product((h + m.up_bias[number]).relu(), m.down, ends), order)


def in_runs_turned_round(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: the second product takes the features of an expert in the opposite order."""
    taken, number, order = _sorted(rows, ids)
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends).relu()
    return _unsorted(grouped_product(h.flip(-1), m.down, ends), order)


def in_runs_scaled_alike(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: one vector `scale` (F,) for the features of all experts."""
    taken, number, order = _sorted(rows, ids)
    ends = torch.histc(number.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = grouped_product(taken, m.up, ends).relu()
    return _unsorted(grouped_product(h * m.scale, m.down, ends), order)  # type: ignore[operator]


def merged(m: Experts, rows: Tensor, ids: Tensor) -> Tensor:
    """A near miss: one matrix for all tokens, the mean of those of all experts."""
    h = torch.mm(rows.repeat_interleave(CHOSEN, 0), m.up.mean(0)).relu()
    return torch.mm(h, m.down.mean(0))


def decoder(way: Way, *, bias: bool = False) -> nn.Module:
    """Return a decoder of one branch with such experts."""
    return one_branch(lambda: Experts(way, bias=bias))
