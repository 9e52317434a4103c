"""The number of parameters that remain when every site keeps a part of its features.

    T(s) = Σ over parameters of Π over axes of (positions kept on that axis)

(arXiv 2410.11988, section 3; the count follows from the slices, so grouped-query attention, fused
projections and stacked experts are not special cases.)  `ParameterCount.of_sites` reads the slices once;
`count` is then a few tensor operations, independent of the number of sites.

Rules for counting a position on an axis:

1. A position that no slice labels is always kept.
2. A position labelled by one feature is kept if that feature is.
3. A position labelled by several features (several slices on one axis) is kept if all of them are.

If experts have their own features, an axis counts the positions of all matrices of the stack together, and
the expert axis is not a factor: the count is a sum over experts.

Features that every axis counts equally, usually all features of a site, form an *atom*: the masks
are first summed per atom, then a small linear map gives the size of every axis.

Shapes: N features of all sites, A atoms, X distinct axis sizes, E terms of the linear map,
O positions with several features, P products (parameters with equal cut axes merged),
J cut axes in a product, S samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import get_args

import torch
from torch import Tensor

from dispfx.errors import BudgetError
from dispfx.ir.sites import Site
from dispfx.plan.axes import AxisSize, Features, axis_sizes, expert_axes
from dispfx.plan.budget import Counted
from dispfx.plan.groups import Groups
from dispfx.plan.limit import Limit
from dispfx.plan.linear_count import LinearCount
from dispfx.plan.own_cost import OwnCost
from dispfx.settings.sections import RatioOf
from dispfx.words.own_function import names_function, own_function, shown


@dataclass(frozen=True, eq=False)
class ParameterCount:
    """The parameter count of one decoder as a function of its masks.

    Args:
        dense: counted parameters if everything is kept.
        of: `blocks` counts parameters that some site cuts, `total` all of them, and a user's function
            what it returns (`dispfx.plan.own_cost`), in units with which the dense decoder has `dense`.
        parameters: paths of the counted parameters that some site cuts.
        features: N, the length of the flat mask vector.
        fixed: counted parameters that no site cuts.
        shapes: of the parameters that some site cuts.
        own: a user's cost, in place of parameters.
        cache: bytes of the KV cache per token, where the budget names a share of it.
        limits: of the constraints of the budget.
    """

    dense: int
    of: Counted
    parameters: tuple[str, ...]
    features: int
    fixed: int
    shapes: Mapping[str, tuple[int, ...]]
    _by_atom_N: Tensor | None  # order in which the features of an atom are neighbours; None: already so
    _atom_bounds: Tensor  # (A + 1,)
    _atom_N: Tensor  # of every feature
    _term_axis_E: Tensor
    _term_atom_E: Tensor
    _term_weight_E: Tensor
    _untouched_X: Tensor
    _joint_axis_O: Tensor
    _joint_features: Tensor  # (O, features of a position), padded with N
    _product_axes_PJ: Tensor  # padded with X
    _product_weight_P: Tensor
    own: OwnCost | None = None
    cache: LinearCount | None = None
    limits: tuple[Limit, ...] = ()

    @staticmethod
    def of_sites(
        sites: Sequence[Site],
        shapes: Mapping[str, tuple[int, ...]],
        budget_of: Counted = "blocks",
        item_bytes: Mapping[str, int] | None = None,
    ) -> "ParameterCount":
        """Return the count of a decoder.

        Args:
            sites: in the order of the flat mask vector.
            shapes: of every parameter by path; tied ones once.
            item_bytes: of every parameter by path, to count bytes in place of parameters.

        Raises:
            BudgetError: if no site cuts a parameter, or a function of the user returns no cost.
            SourceError: if a function of the user cannot be loaded, or raises an error.
            PassError: if a slice does not fit its parameter.
        """
        features = Features.of_sites(sites)
        sizes = axis_sizes(sites, shapes, features)
        if not sizes:
            raise BudgetError(
                "a ratio needs parameters that some site cuts, but no site cuts any",
                hint="`dispfx inspect` shows why every branch was left dense",
            )
        cut = {path for path, _ in sizes}
        counted = set(shapes) if budget_of == "total" else cut
        each = dict.fromkeys(shapes, 1) if item_bytes is None else item_bytes
        dense = sum(prod(shapes[path]) * each[path] for path in counted)
        fixed = dense - sum(prod(shapes[path]) * each[path] for path in cut)
        rows = list(dict.fromkeys(sizes.values()))
        atoms = features.atoms(rows)
        products = _products(sizes, shapes, rows, expert_axes(sites), each)
        own = None
        if budget_of not in get_args(RatioOf):
            if not names_function(budget_of):
                raise BudgetError(
                    f"a plan does not hold the function that its ratio counts: {shown(budget_of)}",
                    hint="make the plan again with another alignment, in place of changing it",
                )
            column_of = {place: rows.index(size) for place, size in sizes.items()}
            own = OwnCost.of_sites(own_function(budget_of), sites, shapes, column_of)
        return ParameterCount(
            dense,
            budget_of,
            tuple(sorted(cut)),
            features.total,
            fixed,
            {path: tuple(shapes[path]) for path in sorted(cut)},
            atoms.order,
            atoms.bounds,
            atoms.of_feature(),
            *atoms.linear_map(rows),
            torch.tensor([row.untouched for row in rows], dtype=torch.float64),
            *_joint_positions(rows, features.total),
            *products,
            own,
        )

    def to(self, device: torch.device | str) -> "ParameterCount":
        """Return the same count with its tables on `device`."""
        tables = {
            entry.name: value.to(device)
            for entry in fields(self)
            if isinstance(value := getattr(self, entry.name), Tensor)
        }
        cache = None if self.cache is None else self.cache.to(device)
        limits = tuple(limit.to(device) for limit in self.limits)
        return replace(self, cache=cache, limits=limits, **tables)

    def with_targets(self, cache: LinearCount | None, limits: Sequence[Limit]) -> "ParameterCount":
        """Return the same count with what a budget has as targets besides its ratio."""
        return replace(self, cache=cache, limits=tuple(limits))

    def count(self, masks: Tensor) -> Tensor:
        """Return T(s) in float64, differentiable in the masks.

        Exact for masks of zeros and ones: every intermediate is an integer below 2^53.

        Args:
            masks: (N,) one value in [0, 1] per feature, all sites in order, or (S, N) for S samples.

        Returns:
            A scalar, or (S,); with P costs of the user that each meet the ratio, (P,) or (S, P).
        """
        if masks.dim() == 1:
            return self.count(masks[None])[0]
        masks_SN = masks.to(torch.float64)
        atoms_SA: Tensor = _AtomSums.apply(masks_SN, self._by_atom_N, self._atom_bounds, self._atom_N)
        terms_SE = self._term_weight_E * atoms_SA[:, self._term_atom_E]
        start_SX = self._untouched_X.expand(len(masks_SN), -1)
        sizes_SX = start_SX.index_add(1, self._term_axis_E, terms_SE)
        one = masks_SN.new_ones(len(masks_SN), 1)
        if len(self._joint_axis_O):
            kept_SO = torch.cat((masks_SN, one), 1)[:, self._joint_features].prod(2)
            sizes_SX = sizes_SX.index_add(1, self._joint_axis_O, kept_SO)
        if self.own is not None:
            left_SP = self.own.shares(sizes_SX) * self.dense
            return left_SP if left_SP.shape[1] > 1 else left_SP[:, 0]
        sizes_SX = torch.cat((sizes_SX, one), 1)
        product_SP = self._product_weight_P
        for axis_P in self._product_axes_PJ.unbind(1):
            product_SP = product_SP * sizes_SX[:, axis_P]
        return product_SP.sum(1) + self.fixed

    def count_kept(self, masks_N: Tensor) -> int:
        """Return T(s) as an exact integer for hard masks (bool, or 0 and 1 in any type).

        Of several costs of the user, the mean.
        """
        return round(float(self.count(masks_N.detach()).mean()))

    def parts(self) -> "list[ParameterCount]":
        """Return the counts that must each meet the ratio: one per number of a user's cost."""
        own = self.own
        return [self] if own is None else [replace(self, own=own.only(name)) for name in own.dense]

    def feature_costs(self, groups: Groups) -> Tensor:
        """Return the number of parameters that removing each feature alone would remove, at least one.

        Args:
            groups: of sites; on the device of the count.

        Returns:
            (G,) float32, one number per feature of all groups.
        """
        return self.slopes(groups).clamp_min(1.0)

    def slopes(self, groups: Groups) -> Tensor:
        """Return the gradient of the count, (G,), for every feature of all groups, with everything kept."""
        masks_G = torch.ones(groups.features, device=self._untouched_X.device, requires_grad=True)
        with torch.enable_grad():  # callers often measure with gradients off
            (costs_G,) = torch.autograd.grad(self.count(groups.expand(masks_G)).sum(), masks_G)
        return costs_G


class _AtomSums(torch.autograd.Function):
    """Sum the features of every atom: (S, N) to (S, A).

    On a GPU, a segment of a vector is summed by many threads, but that of a matrix by one, so the samples are
    laid out as segments of one vector.  The gradient of a feature is that of its atom: a lookup.
    """

    @staticmethod
    def forward(ctx, masks_SN: Tensor, by_atom_N: Tensor | None, bounds: Tensor, atom_N: Tensor) -> Tensor:
        ctx.save_for_backward(atom_N)
        ordered_SN = masks_SN if by_atom_N is None else masks_SN[:, by_atom_N]
        samples, features = ordered_SN.shape
        starts_S = torch.arange(samples, device=bounds.device) * features
        offsets = torch.cat(((starts_S[:, None] + bounds[:-1]).flatten(), bounds[-1:] * samples))
        vector = ordered_SN.contiguous().flatten()
        return torch.segment_reduce(vector, "sum", offsets=offsets, unsafe=True).view(samples, -1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (atom_N,) = ctx.saved_tensors
        return grads[0][:, atom_N], None, None, None


def _products(
    sizes: Mapping[tuple[str, int], AxisSize],
    shapes: Mapping[str, tuple[int, ...]],
    rows: Sequence[AxisSize],
    counted: Mapping[str, int],
    each: Mapping[str, int],
) -> tuple[Tensor, Tensor]:
    """Return (P, J) axis sizes that are multiplied and (P,) weights, the product of all other axes.

    Args:
        each: how much one number of a parameter counts.
    """
    row_of = {row: index for index, row in enumerate(rows)}
    cut_axes: dict[str, dict[int, int]] = {}
    for (path, axis), size in sizes.items():
        cut_axes.setdefault(path, {})[axis] = row_of[size]
    merged: dict[tuple[int, ...], int] = {}
    for path, cut in cut_axes.items():
        factors = {*cut, counted.get(path)}
        uncut = prod(size for axis, size in enumerate(shapes[path]) if axis not in factors)
        key = tuple(sorted(cut.values()))
        merged[key] = merged.get(key, 0) + uncut * each[path]
    longest = max(len(axes) for axes in merged)
    padded = [[*axes, *[len(rows)] * (longest - len(axes))] for axes in merged]
    return torch.tensor(padded), torch.tensor(list(merged.values()), dtype=torch.float64)


def _joint_positions(rows: Sequence[AxisSize], features: int) -> tuple[Tensor, Tensor]:
    """Return (O,) axes and (O, longest) features of the positions that follow several features."""
    axes, positions = [], []
    for index, row in enumerate(rows):
        axes += [index] * len(row.joint)
        positions += row.joint
    longest = max((len(position) for position in positions), default=0)
    padded = [[*position, *[features] * (longest - len(position))] for position in positions]
    return torch.tensor(axes, dtype=torch.int64), torch.tensor(padded, dtype=torch.int64)
