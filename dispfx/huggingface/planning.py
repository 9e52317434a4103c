"""From sites and selections to a layout: which module selects, which one scatters, which is only smaller.

    site      becomes
    read      the norm before it selects, where nothing else reads the norm; else every reader does
    inner     smaller modules, where the code between them takes any width; else its producers scatter and
              its consumers read, and everything between keeps its width
    heads     smaller projections in an attention that counts fewer heads, where its code takes any number;
              else as inner features, and its cache keeps its size
    values    the value projection is smaller and scatters among zeros, and the output projection reads: the
              code of attention keeps one size for queries, keys and values, and its cache keeps its size
    write     the producer scatters among zeros
    stream    every module that owns a weight of it is smaller, embedding, norms and head too

Modules are known by the weights that they own.  What cannot be built this way is a `Mismatch`; what can
is compared with the lowered graph before it is written, since the code of a module is not read here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dispfx.analysis.label_map import Mismatch
from dispfx.analysis.positions import kept_features, kept_positions, places, taken, zeroed
from dispfx.huggingface.facts import Facts, owner_of
from dispfx.huggingface.layout import SELECT, Layout, ModuleLayout, digest
from dispfx.huggingface.widths import Axis, Cut, Widths, counted_heads, is_linear, is_stacked, tied_layout
from dispfx.ir.program import Program
from dispfx.ir.sites import Site


@dataclass(frozen=True, eq=False)
class Planned:
    """What a pruned decoder is made of.

    Args:
        layout: of its modules.
        indices: the index buffers, by "module path.buffer name".
        kept: positions that stay on each axis that is cut, (K,), or (E, K) where they differ by expert.
        zeroed: positions, among those that stay, whose values are zero.
    """

    layout: Layout
    indices: Mapping[str, Tensor]
    kept: Mapping[Axis, np.ndarray]
    zeroed: Mapping[Axis, np.ndarray]

    def cut(self, path: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the dense decoder as the pruned one has it."""
        tensor = tensor.detach()
        for changes, change in ((self.kept, taken), (self.zeroed, zeroed)):
            for axis in range(tensor.dim()):
                if (path, axis) in changes:
                    tensor = change(tensor, axis, changes[path, axis])
        return tensor

    def lowered(self, path: str, tensor: Tensor, stays: Mapping[Axis, np.ndarray]) -> Tensor:
        """Return a tensor of the pruned modules as the lowered graph has it.

        Args:
            stays: positions of the dense decoder that the graph keeps, by axis; from `site_cuts`.
        """
        for axis, positions in self._within(path, tensor.dim(), stays).items():
            tensor = taken(tensor, axis, positions)
        return tensor

    def raised(self, path: str, tensor: Tensor, value: Tensor, stays: Mapping[Axis, np.ndarray]) -> Tensor:
        """Return a tensor of the pruned modules with the values that the lowered graph has.

        What the modules hold beyond the graph stays as it is.

        Args:
            value: of the lowered graph.
            stays: as for `lowered`.
        """
        positions = self._within(path, tensor.dim(), stays)
        return _put(tensor, value, positions) if positions else value

    def _within(self, path: str, dimensions: int, stays: Mapping[Axis, np.ndarray]) -> dict[int, np.ndarray]:
        """Return by axis where the graph's positions are in a tensor, if the modules hold further ones."""
        found = {}
        for axis in range(dimensions):
            if (mask := stays.get((path, axis))) is not None:
                held, wanted = self.kept.get((path, axis), places(np.ones_like(mask))), places(mask)
                if held.shape[-1] > wanted.shape[-1]:
                    found[axis] = _places_within(held, wanted)
        return found

    def values(self, tensors: Mapping[str, Tensor], lowered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the cut parameters of a dense decoder and the index buffers, by path.

        Args:
            tensors: of the dense decoder.
            lowered: of the lowered graph; those that have the right shape are taken as they are.
        """
        found = dict(self.indices)
        for path in {path for path, _ in self.kept}:
            shape = list(tensors[path].shape)
            for axis, size in enumerate(shape):
                positions = self.kept.get((path, axis))
                shape[axis] = size if positions is None else positions.shape[-1]
            same = path in lowered and list(lowered[path].shape) == shape
            found[path] = lowered[path].detach() if same else self.cut(path, tensors[path])
        return found


# What is absent between modules: pruned features and heads, features alone, or neither.  With neither, every
# module has the interface of the dense one, which any code around it can live with.
Unseen = Literal["heads", "features", "nothing"]


def ways(sites: Sequence[Site]) -> tuple[Unseen, ...]:
    """Return what to try for a decoder with these sites, in order."""
    every: tuple[Unseen, ...] = get_args(Unseen)
    return every if any(site.kind == "heads" for site in sites) else every[1:]


def plan_modules(
    program: Program, kept: Mapping[str, Tensor], model: nn.Module, *, unseen: Unseen = "features"
) -> Planned | Mismatch:
    """Return how the modules of `model` are pruned, or why they cannot be.

    Args:
        program: of the decoder, with its sites.
        kept: sorted kept indices by site.
        model: the decoder; only its classes and shapes are looked at, so it may be on the meta device.
        unseen: what of the pruned may be absent between modules.
    """
    planner = _Planner(program, kept, model)
    problems = (planner.problem(site) for site in planner.sites)
    problem = next((found for found in problems if found is not None), None)
    return Mismatch(problem) if problem is not None else planner.plan(unseen)


class _Planner:
    """Sites, and the modules that own their weights."""

    def __init__(self, program: Program, kept: Mapping[str, Tensor], model: nn.Module):
        self.facts = Facts(program)
        self.modules = dict(model.named_modules())
        self.leaves = {path for path, module in self.modules.items() if not list(module.children())}
        self.ties = {path for pair in program.ties.items() for path in pair}
        masks = {site.name: kept_features(site, kept[site.name]) for site in program.sites}
        self.sites = [site for site in program.sites if not masks[site.name].all()]
        self.masks = {site.name: masks[site.name] for site in self.sites}
        self.values = {site.name for site in self.sites if site.kind == "values"}
        self.consumers: dict[str, set[str]] = {}
        self.producers: dict[str, set[str]] = {}
        self.taken = {site.name: self.facts.consumed(site) for site in self.sites}
        for site in self.sites:
            taken = self.taken[site.name]
            cut = {piece.parameter for piece in site.slices}
            if site.kind != "stream":
                cut &= self.facts.product_weights
            self.consumers[site.name] = {owner_of(path) for path in taken}
            self.producers[site.name] = {owner_of(path) for path in cut - taken}

    def owners(self, site: Site) -> set[str]:
        return self.consumers[site.name] | self.producers[site.name]

    def internal(self, site: Site) -> bool:
        """Whether one module produces and consumes the features, so that nobody else sees them."""
        same = self.consumers[site.name] == self.producers[site.name] and len(self.owners(site)) == 1
        return same and site.kind != "stream"

    def problem(self, site: Site) -> str | None:
        """Return why the site cannot be built from modules, or None."""
        owners = self.owners(site)
        both = self.consumers[site.name] & self.producers[site.name]
        if both and not self.internal(site) and site.kind != "stream":
            return f"{site.name}: a module that produces its features also consumes them, and others do too"
        if not owners:
            return f"{site.name}: no module owns its weights"
        for piece in site.slices:
            owner, _, name = piece.parameter.rpartition(".")
            if owner in owners and (owner not in self.modules or name not in self.modules[owner]._parameters):
                return f"{site.name}: no module holds {piece.parameter} as a parameter"
            if piece.parameter in self.ties and site.kind != "stream":
                return f"{site.name}: {piece.parameter} is tied to another weight"
            if owner not in owners and site.kind == "write" and self.facts.adds(piece.parameter):
                return f"{site.name}: {piece.parameter} is added after it and would fill pruned features"
        return None

    def plan(self, unseen: Unseen) -> Planned | Mismatch:
        norms = self._norms() if unseen != "nothing" else {}
        attentions = self._attentions() if unseen == "heads" else []
        thin = self._thin(norms, attentions) if unseen != "nothing" else self._whole()
        for site in self.sites:
            # A module gathers or scatters the same features of every token, whatever its expert.
            if site.is_stacked and site.name not in thin and not self.internal(site):
                return Mismatch(f"{site.name}: its experts keep other features, and other modules see them")
        indices: dict[str, Tensor] = {}
        layouts: dict[str, ModuleLayout] = {}
        kept: dict[Axis, np.ndarray] = {}
        filled: dict[Axis, np.ndarray] = {}
        for name in sorted(norms.keys() & thin):
            mask = self.masks[name]
            readers = tuple(sorted(self.consumers[name]))
            layouts[norms[name]] = ModuleLayout(select=(len(mask), int(mask.sum())), readers=readers)
            indices[f"{norms[name]}.{SELECT}"] = torch.from_numpy(np.flatnonzero(mask).astype(np.int32))
        for path in sorted({owner for site in self.sites for owner in self.owners(site)}):
            widths = self._widths(path, thin)
            layouts[path] = widths.layout()
            for tied in self._tied_to(path):
                layouts[tied] = tied_layout(self.modules[tied], layouts[path])
            indices |= {f"{path}.{name}": index for name, index in widths.indices().items()}
            kept |= widths.kept
            filled |= widths.zeroed
        for site in attentions:
            if site.name in thin:
                further, cut = self._fewer_heads(site)
                layouts |= {path: layout for path, layout in further.items() if path not in layouts}
                kept |= cut
        return Planned(Layout(layouts, digest(indices)), indices, kept, filled)

    def _tied_to(self, path: str) -> list[str]:
        """Return the modules that hold a weight of this one under another path."""
        ties = self.facts.program.ties.items()
        return sorted({owner_of(tied) for tied, kept in ties if owner_of(kept) == path} - {path})

    def _norms(self) -> dict[str, str]:
        """Return the module that selects for all readers of a site, where there is one, by site."""
        found: dict[str, str] = {}
        for site in self.sites:
            owners = self.owners(site)
            if site.kind == "read" and all(is_linear(self.modules[owner]) for owner in owners):
                norm = self.facts.norm_of(site, owners, self.leaves)
                if norm is not None:
                    found[site.name] = norm
        several = [norm for norm in found.values() if list(found.values()).count(norm) > 1]
        return {name: norm for name, norm in found.items() if norm not in several}

    def _attentions(self) -> list[Site]:
        """Return the sites of heads that an attention may count fewer of."""
        return [
            site
            for site in self.sites
            if site.kind == "heads"
            and all(is_linear(self.modules[owner]) for owner in self.owners(site))
            and not self.facts.cuts_buffers(site)
        ]

    def _fewer_heads(self, site: Site) -> tuple[dict[str, ModuleLayout], dict[Axis, np.ndarray]]:
        """Return what changes around the projections of heads: numbers of heads, widths, other parameters."""
        mask = self.masks[site.name]
        heads, widths = (self.facts.widths(site, mask, of_weights=it) for it in (False, True))
        paths = {owner_of(piece.parameter) for piece in site.slices}
        scopes = {path for path in paths | _modules_around(paths) if not is_linear(self.modules[path])}
        shapes: dict[str, dict[str, list[int]]] = {path: {} for path in scopes}
        cut: dict[Axis, np.ndarray] = {}
        for piece in site.slices:
            owner, _, name = piece.parameter.rpartition(".")
            if owner in scopes:
                stays = places(kept_positions(piece.labels, mask))
                whole = list(self.modules[owner].get_parameter(name).shape)
                shapes[owner].setdefault(name, whole)[piece.axis] = len(stays)
                cut[piece.parameter, piece.axis] = stays
        layouts = {
            path: ModuleLayout(
                {name: tuple(shape) for name, shape in sorted(shapes[path].items())},
                counted_heads(self.modules[path], heads, widths),
            )
            for path in sorted(scopes)
        }
        return {path: layout for path, layout in layouts.items() if layout.shapes or layout.sizes}, cut

    def _thin(self, norms: Mapping[str, str], attentions: Sequence[Site]) -> set[str]:
        """Return the sites whose pruned features are absent between modules, too."""
        passing = {site.name for site in self.sites if self._passes(site)}
        thin = set(norms) | {site.name for site in attentions} | self._whole() | passing
        while True:
            # An axis where other features keep their places keeps all of them.
            # Values may: they are features of the heads that are left.
            mixed = [
                sites & thin
                for sites in self._interfaces()
                if sites & thin and not sites - self.values <= thin
            ]
            if not mixed:
                return thin
            thin -= set().union(*mixed)

    def _whole(self) -> set[str]:
        """Return the site of the whole stream, whose pruned features are nowhere at all."""
        return {site.name for site in self.sites if site.kind == "stream"}

    def _passes(self, site: Site) -> bool:
        owners = self.owners(site)
        inside = all(owner_of(piece.parameter) in owners for piece in site.slices)
        stacked = [is_stacked(self.modules[path], path, self.facts.product_weights) for path in owners]
        if site.kind != "inner" or self.internal(site) or not inside or any(stacked):
            return False
        return self.facts.passes_any_width(site, self.masks[site.name], owners)

    def _interfaces(self) -> list[set[str]]:
        """Return the sites that meet on the input, and on the output, of each module."""
        meeting: dict[tuple[str, str], set[str]] = {}
        for site in self.sites:
            if not self.internal(site):
                for side, owners in (("in", self.consumers), ("out", self.producers)):
                    for owner in owners[site.name]:
                        meeting.setdefault((owner, side), set()).add(site.name)
        return list(meeting.values())

    def _side(self, site: Site, path: str, parameter: str) -> str:
        """Return on which side of its module a parameter has the features of a site."""
        if self.internal(site):
            return "internal"
        # A module that takes features of the whole stream may give some, too.
        takes = (
            parameter in self.taken[site.name] if site.kind == "stream" else path in self.consumers[site.name]
        )
        return "in" if takes else "out"

    def _widths(self, path: str, thin: set[str]) -> Widths:
        cuts = []
        for site in self.sites:
            for piece in site.slices:
                if owner_of(piece.parameter) == path and path in self.owners(site):
                    side = self._side(site, path, piece.parameter)
                    mask = self.masks[site.name]
                    features = site.per_expert if piece.by_expert else site.size
                    labels = np.arange(features) if piece.labels is None else np.asarray(piece.labels)
                    stays = kept_positions(labels, mask)
                    absent = site.name in thin
                    cuts.append(Cut((piece.parameter, piece.axis), side, site.name, stays, labels, absent))
        sites = {side: {cut.site for cut in cuts if cut.side == side} for side in ("in", "out")}
        return Widths(
            path,
            self.modules[path],
            cuts,
            self.facts.product_weights,
            reads=not sites["in"] <= thin,
            writes=not sites["out"] <= thin,
        )


def _modules_around(paths: Collection[str]) -> set[str]:
    """Return the paths of the innermost module that holds all of some modules, and of those between."""
    parts = [path.split(".") for path in sorted(paths)]
    shared = len(
        [pair for pair in takewhile(lambda pair: pair[0] == pair[1], zip(parts[0], parts[-1], strict=False))]
    )
    return {".".join(path[:depth]) for path in parts for depth in range(max(shared, 1), len(path))}


def site_cuts(sites: Sequence[Site], kept: Mapping[str, Tensor]) -> dict[Axis, np.ndarray]:
    """Return for each axis that some site cuts which of its positions stay in the lowered graph."""
    stays: dict[Axis, np.ndarray] = {}
    for site in sites:
        for piece in site.slices:
            axis = (piece.parameter, piece.axis)
            positions = kept_positions(piece.labels, kept_features(site, kept[site.name]))
            stays[axis] = stays[axis] & positions if axis in stays else positions
    return stays


def _places_within(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return where wanted positions lie among those held, (K,) or for each expert."""
    if held.ndim == 1:
        return np.searchsorted(held, wanted)
    return np.stack([np.searchsorted(own, some) for own, some in zip(held, wanted, strict=True)])


def _put(tensor: Tensor, value: Tensor, positions: Mapping[int, np.ndarray]) -> Tensor:
    """Return a tensor with values at positions of some axes: (K,), or (E, K) for each matrix."""
    if any(own.ndim > 1 for own in positions.values()):
        of_each = [
            {axis - 1: own[expert] if own.ndim > 1 else own for axis, own in positions.items() if axis}
            for expert in range(len(tensor))
        ]
        return torch.stack([_put(*parts) for parts in zip(tensor, value, of_each, strict=True)])
    every = [positions.get(axis, np.arange(size)) for axis, size in enumerate(tensor.shape)]
    found = tensor.clone()
    found[tuple(torch.from_numpy(index) for index in np.ix_(*every))] = value
    return found
