"""Scales of kept features, as separate tensors and folded into the weights.

    y = linear(scale · x, w)         →    y = linear(x, w')         w' = w · scale along the columns
    h = x + place(scale · (v a + b)) →    h = x + place(v' a + b')  v', b' = v, b · scale along the rows
    h = x + place(scale · norm · w)  →    h = x + place(norm · w')  w' = w · scale, or (1 + w) · scale − 1

Which parameters take a site's scales follows from its gates: a read or an inner site is folded into the
products that take its values, a write into what makes them.  Whether that gives the same function is then
measured, with scales drawn at random; a site for which no way does has no scales.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dispfx.analysis.positions import kept_by_all, kept_features
from dispfx.compiler.pipelines import run_pipeline
from dispfx.ir import ops
from dispfx.ir.logit_errors import logit_errors
from dispfx.ir.program import Program
from dispfx.ir.retype import retyped
from dispfx.ir.sites import UNTOUCHED, Site, Slice
from dispfx.passes.insert_scales import SCALE_PREFIX

# Of the largest logit, in float32: another order of products.  A wrong fold is off by more than a tenth.
_TOLERANCE = 1e-3
_LEAST, _MOST = 0.5, 1.5
_TRIED_SHAPE = (2, 9)


@dataclass(frozen=True)
class Fold:
    """Where a site's scales go.

    Args:
        site: its name.
        slices: the parameter axes that take them.
        shift: what the decoder adds to these parameters before it multiplies by them, as norms with 1 + w do.
    """

    site: str
    slices: tuple[Slice, ...]
    shift: float = 0.0


@dataclass(frozen=True, eq=False)
class Scaled:
    """A lowered program with scales.

    Args:
        program: with the scales as parameters of its graph; all other tensors are those of `lowered`.
        lowered: without them.
        kept: sorted kept indices by site.
        folds: one for each site that has scales.
    """

    program: Program
    lowered: Program
    kept: Mapping[str, Tensor]
    folds: tuple[Fold, ...]

    @property
    def scales(self) -> dict[str, nn.Parameter]:
        """The scales by the names of their parameters."""
        named = dict(self.program.graph_module.named_parameters())
        return {path: named[path] for path in (f"{SCALE_PREFIX}.{fold.site}" for fold in self.folds)}

    def folded(self) -> dict[str, Tensor]:
        """Return the parameters of `lowered` that take scales, with them."""
        return _folded(self.lowered, self.kept, self.folds, self.scales)


def insert_scales(lowered: Program, kept: Mapping[str, Tensor]) -> Scaled:
    """Return a lowered program with scales of one at every site for which they can be folded.

    Args:
        lowered: with values, on its device; it is not changed.
        kept: sorted kept indices by site name.
    """
    program = run_pipeline("scale", lowered.clone(), kept=kept)
    paths = {path for path, _ in program.graph_module.named_parameters() if path.startswith(SCALE_PREFIX)}
    sites = [site for site in lowered.sites if f"{SCALE_PREFIX}.{site.name}" in paths]
    trial = _Trial(lowered, program, kept)
    ways = {site.name: list(_ways(lowered, site)) for site in sites}
    first = [found[0] for found in ways.values() if found]
    folds = (
        first
        if trial.holds(first)
        else [
            fold
            for found in ways.values()
            if (fold := next(filter(trial.holds_alone, found), None)) is not None
        ]
    )
    return Scaled(program, lowered, kept, tuple(folds))


def _ways(lowered: Program, site: Site) -> Iterator[Fold]:
    """Yield the ways in which a site's scales may be folded, the likeliest first."""
    taken = _taken(lowered, site)
    if site.kind == "write":
        made = tuple(cut for cut in site.slices if cut.parameter not in taken)
        norm = tuple(cut for cut in made if len(lowered.shapes[cut.parameter]) == 1)
        ways = [Fold(site.name, made), Fold(site.name, norm), Fold(site.name, norm, shift=1.0)]
    else:
        ways = [Fold(site.name, tuple(cut for cut in site.slices if cut.parameter in taken))]
    yield from (way for way in dict.fromkeys(ways) if way.slices)


def _taken(lowered: Program, site: Site) -> set[str]:
    """Return the weights of the products that take the site's gated values."""
    nodes, cut = lowered.nodes, {one.parameter for one in site.slices}
    users = [nodes[user] for point in site.gates for user in point.users if user in nodes]
    factors = [value for user in users if ops.is_product(user) for value in ops.operands(user)]
    return {path for value in factors if (path := ops.weight_of(value)) is not None and path in cut}


class _Trial:
    """Compares separate scales with scales folded into the weights, in float32."""

    def __init__(self, lowered: Program, program: Program, kept: Mapping[str, Tensor]):
        self._lowered, self._kept = lowered, kept
        dtype = lowered.dtype
        self._scaled, self._plain = (
            retyped(one.graph_module, dtype, torch.float32) for one in (program, lowered)
        )
        generator = torch.Generator().manual_seed(0)
        self._drawn = {
            path: torch.empty(one.shape).uniform_(_LEAST, _MOST, generator=generator).to(one.device)
            for path, one in self._scaled.named_parameters()
            if path.startswith(SCALE_PREFIX)
        }
        shape = (_TRIED_SHAPE[0], lowered.lengths.within(_TRIED_SHAPE[1]))
        self._ids = torch.randint(lowered.known_tokens, shape, generator=generator).to(lowered.device)

    def holds_alone(self, fold: Fold) -> bool:
        """Whether one site's scales can be folded so."""
        return self.holds([fold])

    @torch.no_grad()
    def holds(self, folds: Sequence[Fold]) -> bool:
        """Whether the scales of some sites can be folded so."""
        chosen = {f"{SCALE_PREFIX}.{fold.site}" for fold in folds}
        scales = {path: one if path in chosen else torch.ones_like(one) for path, one in self._drawn.items()}
        named = dict(self._plain.named_parameters())
        weights = _folded(self._lowered, self._kept, folds, scales, named)
        apart = _logits(torch.func.functional_call(self._scaled, scales, (self._ids,)))
        inside = _logits(torch.func.functional_call(self._plain, weights, (self._ids,)))
        return logit_errors(apart, inside)[1] <= _TOLERANCE


def _logits(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@torch.no_grad()
def _folded(
    lowered: Program,
    kept: Mapping[str, Tensor],
    folds: Sequence[Fold],
    scales: Mapping[str, Tensor],
    named: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the parameters that take scales, multiplied in float32 and rounded once."""
    own = lowered.parameters if named is None else named
    found: dict[str, Tensor] = {}
    masks = {site.name: kept_features(site, kept[site.name]) for site in lowered.sites}
    cuts: dict[tuple[str, int], list[tuple[tuple[int, ...] | None, np.ndarray]]] = {}
    for site in lowered.sites:
        for cut in site.slices:
            cuts.setdefault((cut.parameter, cut.axis), []).append((cut.labels, masks[site.name]))
    for fold in folds:
        scale = scales[f"{SCALE_PREFIX}.{fold.site}"].float()
        mask = masks[fold.site]
        for cut in fold.slices:
            tensor = found.get(cut.parameter, own[cut.parameter].detach().float())
            labels = np.arange(len(mask)) if cut.labels is None else np.asarray(cut.labels)
            spread = _of_positions(labels[kept_by_all(cuts[cut.parameter, cut.axis])], mask, scale)
            shape = [-1] + [1] * (tensor.dim() - 1 - cut.axis)
            found[cut.parameter] = (tensor + fold.shift) * spread.view(shape) - fold.shift
    return {path: tensor.to(own[path].dtype) for path, tensor in found.items()}


def _of_positions(stays: np.ndarray, mask: np.ndarray, scale: Tensor) -> Tensor:
    """Return the scale of each position that stays, by its feature; one where it follows none."""
    places = np.where(stays == UNTOUCHED, len(scale), np.cumsum(mask)[np.maximum(stays, 0)] - 1)
    padded = torch.cat([scale, scale.new_ones(1)])
    return padded[torch.from_numpy(places).to(scale.device)]
