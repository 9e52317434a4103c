"""How one module becomes smaller: which positions of its weights stay, and what it gathers.

1. A position of an axis stays if every site that labels it keeps its feature.
2. A module with one weight has a width of its own on either side.
3. A module with several weights (stacked experts) allocates its output from its input, so both get one
   width, a multiple of eight, which grouped products want.  The same goes for the features that only it
   sees.  Features that are added for that are pruned ones with weights of zero: what they read is a zero,
   nobody gathers what they write, and so no gradient reaches them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dispfx.analysis.positions import places
from dispfx.huggingface.layout import READ, WRITE, ModuleLayout
from dispfx.huggingface.widths_of_config import number_of

Axis = tuple[str, int]
MULTIPLE = 8
ANY_SIDE = ""
_OF_ONE_HEAD = ("dim", "size", "group")
_WIDTHS = ("size", "dim", "width", "d_model", "embed")


@dataclass(frozen=True, eq=False)
class Cut:
    """One axis of one parameter, by what the module does with it.

    Args:
        axis: the parameter's path and its dimension.
        side: `in` where the module is given the features, `out` where it gives them, `internal`.
        site: whose features they are.
        stays: for each position whether it stays, (P,), or (E, P) where that differs by expert.
        labels: for each position the site's feature that it follows, or -1.
        absent: whether the pruned features are absent between modules, so that nothing gathers them.
    """

    axis: Axis
    side: str
    site: str
    stays: np.ndarray
    labels: np.ndarray
    absent: bool


@dataclass(eq=False)
class Widths:
    """One module and its cuts.

    Args:
        path: of the module.
        module: the dense one.
        cuts: of its parameters.
        weights: paths of the module's parameters that are operands of products.
        reads: whether it gathers its input.
        writes: whether it scatters its output.
    """

    path: str
    module: nn.Module
    cuts: Sequence[Cut]
    weights: frozenset[str]
    reads: bool
    writes: bool
    kept: dict[Axis, np.ndarray] = field(init=False)
    zeroed: dict[Axis, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        stays: dict[Axis, np.ndarray] = {}
        for cut in self.cuts:
            stays[cut.axis] = stays[cut.axis] & cut.stays if cut.axis in stays else cut.stays
        held = {axis: positions.copy() for axis, positions in stays.items()}
        if self.stacked:
            self._even_out(held)
        self._stays = stays
        self.kept = {axis: places(positions) for axis, positions in held.items()}
        added = {axis: ~np.take_along_axis(stays[axis], kept, -1) for axis, kept in self.kept.items()}
        self.zeroed = {axis: places(positions) for axis, positions in added.items() if positions.any()}

    @property
    def stacked(self) -> bool:
        """Whether the module's own code holds several weights together."""
        return is_stacked(self.module, self.path, self.weights)

    def layout(self) -> ModuleLayout:
        """Return what differs in the module."""
        shapes: dict[str, list[int]] = {}
        for (parameter, axis), kept in self.kept.items():
            name = parameter.rpartition(".")[2]
            own = self.module.get_parameter(name)
            shapes.setdefault(name, list(own.shape))[axis] = kept.shape[-1]
        read, write = (self._axis(side) if gathers else None for side, gathers in self._gathers())
        return ModuleLayout(
            {name: tuple(shape) for name, shape in sorted(shapes.items())},
            self._sizes(),
            read=None if read is None else (int(self._present(read).sum()), len(self.kept[read])),
            padded=read in self.zeroed,
            write=None if write is None else (int(self._present(write).sum()), len(self.kept[write])),
        )

    def indices(self) -> dict[str, Tensor]:
        """Return the index buffers of the module by name."""
        found: dict[str, Tensor] = {}
        for side, gathers in self._gathers():
            if not gathers:
                continue
            axis = self._axis(side)
            stays, kept, present = self._stays[axis], self.kept[axis], self._present(axis)
            if side == "in":
                index = np.where(stays[kept], (present.cumsum() - 1)[kept], int(present.sum()))
            else:
                index = np.full(len(stays), len(kept))
                index[kept] = np.where(stays[kept], np.arange(len(kept)), len(kept))
                index = index[present]
            found[READ if side == "in" else WRITE] = torch.from_numpy(index.astype(np.int32))
        return found

    def _gathers(self) -> tuple[tuple[str, bool], tuple[str, bool]]:
        return ("in", self.reads), ("out", self.writes)

    def _present(self, axis: Axis) -> np.ndarray:
        """Return which positions of an axis exist between modules: those that not every module leaves out."""
        present = np.ones(len(self._stays[axis]), dtype=bool)
        for cut in self.cuts:
            if cut.axis == axis and cut.absent:
                present &= cut.stays
        return present

    def _axis(self, side: str) -> Axis:
        """Return the axis of a product weight on a side."""
        return next(cut.axis for cut in self.cuts if cut.side == side and cut.axis[0] in self.weights)

    def _even_out(self, held: dict[Axis, np.ndarray]) -> None:
        """Keep pruned positions as well, until widths that must be equal are (rule 3)."""
        sides = {side: [cut for cut in self.cuts if cut.side == side] for side in ("in", "out")}
        widths = [int(held[cut.axis].sum()) for cuts in sides.values() for cut in cuts]
        if not all(sides.values()):
            # The side that is not cut keeps its full width, and so does the other.
            widths += [len(cut.stays) for cuts in sides.values() for cut in cuts]
        for cut in (*sides["in"], *sides["out"]):
            held[cut.axis] = _widened(held[cut.axis], _multiple(max(widths)))
        for site in sorted({cut.site for cut in self.cuts if cut.side == "internal"}):
            cuts = [cut for cut in self.cuts if cut.site == site and cut.side == "internal"]
            features = _kept_features(cuts)
            wider = _widened(features, _multiple(_width(features)))
            for cut in cuts:
                follows = cut.labels >= 0
                held[cut.axis] |= follows & wider[..., np.maximum(cut.labels, 0)]

    def _sizes(self) -> dict[str, int]:
        """Return the whole numbers by which the module remembers widths that have changed."""
        own = [cut for cut in self.cuts if cut.axis[0] in self.weights] or self.cuts
        widths = {cut.side: (cut.stays.shape[-1], self.kept[cut.axis].shape[-1]) for cut in own}
        if "internal" in widths:
            features = _kept_features([cut for cut in self.cuts if cut.side == "internal"])
            widths["internal"] = (features.shape[-1], _multiple(_width(features), features.shape[-1]))
        return _renumbered(self.module, widths)


def is_stacked(module: nn.Module, path: str, weights: frozenset[str]) -> bool:
    """Whether a module owns several of the weights of products itself."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return sum(f"{path}.{name}" in weights for name in own) > 1


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one matrix product whose widths it keeps as attributes."""
    return isinstance(module, nn.Linear | Conv1D)


def tied_layout(module: nn.Module, layout: ModuleLayout) -> ModuleLayout:
    """Return the layout of a module that shares its weight with another one, whose layout is given."""
    shapes = {
        name: shape for name, shape in layout.shapes.items() if module._parameters.get(name) is not None
    }
    axes = [
        (old, new)
        for name, shape in shapes.items()
        for old, new in zip(module._parameters[name].shape, shape, strict=True)  # type: ignore[union-attr]
        if old != new
    ]
    return ModuleLayout(shapes, _renumbered(module, {"in": axes[0]}) if axes else {})


def counted_heads(
    attention: nn.Module, heads: Mapping[int, int], widths: Mapping[int, int]
) -> dict[str, int]:
    """Return the new values of the numbers of heads, and of widths, that an attention remembers.

    Numbers of heads have names with `head`; head_dim, head_size and num_key_value_groups stay, and so does
    any other number that counts no heads and is no width of its weights.  The config that it reads is
    looked at as well.

    Args:
        heads: new numbers of heads by their old ones, and lengths of other dimensions that follow them.
        widths: likewise of the axes of weights.
    """
    config = getattr(attention, "config", None)
    named = [] if config is None else filter(_counts_heads, vars(config))
    held: dict[str, Any] = {f"config.{name}": number_of(config, (name,)) for name in named}
    held |= vars(attention)
    new: dict[str, int] = {}
    for name, value in sorted(held.items(), key=lambda item: item[0]):
        known = heads if _counts_heads(name) else widths if _is_of_all_heads(name) else {}
        if type(value) is int and known.get(value, value) != value:
            new[name] = known[value]
    return new


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in _OF_ONE_HEAD)


def _is_of_all_heads(name: str) -> bool:
    return ("head" not in name or "all_head" in name) and any(word in name for word in _WIDTHS)


def _named_widths(module: nn.Module) -> dict[str, str]:
    """Return the side of each attribute that holds a width, or nothing where any number may."""
    if is_linear(module):
        return {"in_features": "in", "nx": "in", "out_features": "out", "nf": "out"}
    return {"embedding_dim": ANY_SIDE} if isinstance(module, nn.Embedding) else {}


def _kept_features(cuts: Sequence[Cut]) -> np.ndarray:
    """Return which of a site's features stay, (N,) or for each expert, from the axes that follow them."""
    size = 1 + max(int(cut.labels.max()) for cut in cuts)
    features = np.zeros((*cuts[0].stays.shape[:-1], size), dtype=bool)
    for cut in cuts:
        follows = cut.labels >= 0
        np.logical_or.at(features.T, cut.labels[follows], cut.stays[..., follows].T)
    return features


def _width(features: np.ndarray) -> int:
    """Return how many features stay, of one expert where they differ by expert."""
    return int(features.sum(axis=-1).max())


def _multiple(width: int, limit: int | None = None) -> int:
    rounded = -(-width // MULTIPLE) * MULTIPLE
    return rounded if limit is None else min(rounded, limit)


def _widened(stays: np.ndarray, width: int) -> np.ndarray:
    """Let further positions stay, the first ones that do not, until there are `width` or no more."""
    if stays.ndim > 1:
        return np.stack([_widened(own, width) for own in stays])
    wider = stays.copy()
    wider[np.flatnonzero(~stays)[: max(0, width - int(stays.sum()))]] = True
    return wider


def _renumbered(module: nn.Module, widths: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Return the new values of attributes that hold a full width.

    Args:
        widths: (full, new) by side.
    """
    named = _named_widths(module)
    sizes: dict[str, int] = {}
    for name, held in vars(module).items():
        # A norm of torch holds the shape that it normalises.
        value = held[0] if isinstance(held, tuple) and len(held) == 1 else held
        if type(value) is not int or (named and name not in named):
            continue
        sides = [
            side
            for side, (full, _) in widths.items()
            if full == value and named.get(name, ANY_SIDE) in (side, ANY_SIDE)
        ]
        hinted = [side for side in sides if name.startswith(side)] or sides
        new = {widths[side][1] for side in hinted}
        if len(new) == 1 and (size := new.pop()) != value:
            sizes[name] = size
    return sizes
