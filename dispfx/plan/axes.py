"""The length of every parameter axis as a function of the kept features, from the slices of all sites.

`axis_sizes` turns labels into an `AxisSize` for every cut axis; `Features.atoms` finds the sets of
features that all axes count alike.  Both run once per decoder, before anything is counted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dispfx.errors import PassError
from dispfx.ir.sites import UNTOUCHED, Site, Slice


@dataclass(frozen=True)
class AxisSize:
    """The length of an axis as a function of the features kept.

    Args:
        untouched: positions that are always kept.
        weights: (site index, number of positions per feature of the site) for positions that follow one
            feature; a single int if the number is the same for all features.  If experts have their own
            features, positions are those of all matrices of the stack together.
        joint: for positions that follow several features, those features.
    """

    untouched: int
    weights: tuple[tuple[int, int | tuple[int, ...]], ...]
    joint: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Atoms:
    """Features that every axis counts alike, as ranges of a reordered feature vector.

    Args:
        order: permutation that makes the features of an atom adjacent, or None if they already are.
        bounds: (A + 1,) first position of every atom, and the end.
        of_site: for every site its atoms as (atom, a feature of it counted within the site).
    """

    order: Tensor | None
    bounds: Tensor
    of_site: tuple[tuple[tuple[int, int], ...], ...]

    def of_feature(self) -> Tensor:
        """Return (N,) the atom of every feature."""
        atoms = torch.arange(len(self.bounds) - 1).repeat_interleave(self.bounds.diff())
        return atoms if self.order is None else torch.empty_like(atoms).scatter(0, self.order, atoms)

    def linear_map(self, rows: Sequence[AxisSize]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (axis, atom, weight) of every term of the map from atom sums to axis sizes."""
        axes, atoms, weights = [], [], []
        for index, row in enumerate(rows):
            for site, weight in row.weights:
                for atom, feature in self.of_site[site]:
                    value = weight if isinstance(weight, int) else weight[feature]
                    if value:
                        axes.append(index)
                        atoms.append(atom)
                        weights.append(value)
        return (
            torch.tensor(axes, dtype=torch.int64),
            torch.tensor(atoms, dtype=torch.int64),
            torch.tensor(weights, dtype=torch.float64),
        )


@dataclass(frozen=True)
class Features:
    """The position of every site's features in the flat vector over all sites."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    experts: tuple[int, ...]

    @staticmethod
    def of_sites(sites: Sequence[Site]) -> "Features":
        """Number the features of all sites, in order."""
        sizes = tuple(site.size for site in sites)
        starts = tuple(accumulate(sizes, initial=0))[:-1]
        return Features(starts, sizes, tuple(site.experts for site in sites))

    @property
    def total(self) -> int:
        """Number of features of all sites."""
        return sum(self.sizes)

    def atoms(self, rows: Sequence[AxisSize]) -> Atoms:
        """Return the coarsest sets of features, within sites, that all `rows` count alike."""
        columns: list[set[tuple[int, ...]]] = [set() for _ in self.sizes]
        for row in rows:
            for site, weight in row.weights:
                if not isinstance(weight, int):
                    columns[site].add(weight)
        order, bounds, of_site = [], [0], []
        for start, size, distinct in zip(self.starts, self.sizes, columns, strict=True):
            members = _equal_columns(size, sorted(distinct))
            of_site.append(tuple((len(bounds) - 1 + i, atom[0]) for i, atom in enumerate(members)))
            for atom in members:
                order += [start + feature for feature in atom]
                bounds.append(bounds[-1] + len(atom))
        in_order = order == list(range(self.total))
        return Atoms(None if in_order else torch.tensor(order), torch.tensor(bounds), tuple(of_site))


def _equal_columns(size: int, rows: Sequence[tuple[int, ...]]) -> Sequence[Sequence[int]]:
    if not rows:
        return [range(size)]
    members: dict[tuple[int, ...], list[int]] = {}
    for feature in range(size):
        members.setdefault(tuple(row[feature] for row in rows), []).append(feature)
    return list(members.values())


def axis_sizes(
    sites: Sequence[Site], shapes: Mapping[str, tuple[int, ...]], features: Features
) -> dict[tuple[str, int], AxisSize]:
    """Return the size of every cut (parameter, axis).

    Raises:
        PassError: if a slice names no parameter, no axis of it, or labels that do not fit.
    """
    cuts: dict[tuple[str, int], list[tuple[int, Slice]]] = {}
    for index, site in enumerate(sites):
        for cut in site.slices:
            _check(site, cut, shapes)
            cuts.setdefault((cut.parameter, cut.axis), []).append((index, cut))
    return {
        (path, axis): _axis_size(shapes[path][axis], found, features) for (path, axis), found in cuts.items()
    }


def expert_axes(sites: Sequence[Site]) -> dict[str, int]:
    """Return the axis that differs by expert, for every stack that has one.

    Raises:
        PassError: if two axes of one stack do.
    """
    axes: dict[str, int] = {}
    for site in sites:
        for cut in site.slices:
            if cut.by_expert and axes.setdefault(cut.parameter, cut.axis) != cut.axis:
                raise PassError("one axis of a stack differs by expert", where=cut.parameter)
    return dict.fromkeys(axes, 0)


def _check(site: Site, cut: Slice, shapes: Mapping[str, tuple[int, ...]]) -> None:
    shape = shapes.get(cut.parameter)
    if shape is None or not 0 <= cut.axis < len(shape):
        raise PassError(
            f"a slice needs an existing axis, but {cut.parameter} (shape {shape}) has no axis {cut.axis}",
            where=site.name,
        )
    length = shape[cut.axis]
    features_each = site.per_expert if cut.by_expert else site.size
    if cut.by_expert and (cut.axis == 0 or shape[0] != site.experts):
        raise PassError(
            f"axis 0 of {cut.parameter} (shape {shape}) must hold the {site.experts} experts of its site",
            where=site.name,
        )
    labelled = features_each if cut.labels is None else len(cut.labels)
    if labelled != length:
        raise PassError(
            f"axis {cut.axis} of {cut.parameter} has {length} positions, but {labelled} are labelled",
            where=site.name,
        )
    if cut.labels and not (min(cut.labels) >= UNTOUCHED and max(cut.labels) < features_each):
        raise PassError(
            f"labels must be in [{UNTOUCHED}, {features_each}), but those of {cut.parameter} are in "
            f"[{min(cut.labels)}, {max(cut.labels)}]",
            where=site.name,
        )


def _axis_size(length: int, cuts: Sequence[tuple[int, Slice]], features: Features) -> AxisSize:
    if len(cuts) == 1:
        return _axis_size_of_one(*cuts[0], features)
    own = next((cut for _, cut in cuts if cut.by_expert), None)
    if own is not None:
        raise PassError(
            "an axis that differs by expert follows one site", where=f"{own.parameter} axis {own.axis}"
        )
    followed: list[set[int]] = [set() for _ in range(length)]
    for site, cut in cuts:
        for position, label in enumerate(range(length) if cut.labels is None else cut.labels):
            if label != UNTOUCHED:
                followed[position].add(features.starts[site] + label)
    alone = Counter(next(iter(position)) for position in followed if len(position) == 1)
    weights = tuple(
        (site, _shortest([alone[features.starts[site] + i] for i in range(features.sizes[site])]))
        for site in sorted({site for site, _ in cuts})
    )
    joint = tuple(sorted(tuple(sorted(position)) for position in followed if len(position) > 1))
    return AxisSize(sum(not position for position in followed), weights, joint)


def _axis_size_of_one(site: int, cut: Slice, features: Features) -> AxisSize:
    if cut.labels is None:
        return AxisSize(0, ((site, 1),), ())
    experts = features.experts[site] if cut.by_expert else 1
    positions = Counter(cut.labels)
    per_feature = [positions[feature] for feature in range(features.sizes[site] // experts)]
    return AxisSize(positions[UNTOUCHED] * experts, ((site, _shortest(per_feature * experts)),), ())


def _shortest(weights: Sequence[int]) -> int | tuple[int, ...]:
    return weights[0] if len(set(weights)) == 1 else tuple(weights)
