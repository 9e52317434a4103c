"""Lower gates to index operations on sliced weights.

    g = gate(norm, mask_0, 2)               s = index_select(norm, 2, index)
    y = linear(g, w)                    →   y = linear(s, w')            w' = w[:, kept]
    u = linear(a, v)                        u = linear(a, v')            v' = v[kept, :]
    h = add(x, gate(u, mask_1, 2))          h = index_add(x, 2, index, u)

Rules:
1. A site that keeps everything lowers to nothing: its gates vanish.
2. A gate on a value that is cut itself vanishes: its features are gone (inner and mean gates).
3. A gate on a full-width value is a read and becomes `index_select`, one per value and site.
4. A write gate becomes `index_add` into the residual stream where its only user is the residual
   addition; otherwise `index_add` into zeros, which keeps the order of the user's own additions.
5. A parameter axis keeps position p if every site that labels p keeps its feature.
6. Sizes in the graph for cut dimensions are recomputed (`dispfx.analysis.cut_sizes`).
7. Where experts keep features of their own, each matrix of a stack is cut by its expert's; all keep equally
   many, and what the graph spells out depends on that number alone (`dispfx.analysis.stacked_experts`,
   rule 4).
8. A mean or a norm over kept statistics becomes one over the remaining features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from dispfx.analysis.cut_sizes import count_sizes
from dispfx.analysis.positions import kept_features, kept_positions, places, taken
from dispfx.ir.kept_statistics import restore
from dispfx.ir.ops import aten, operand, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import INDEX_PREFIX, Program
from dispfx.ir.sites import GatePoint, Site

Cut = dict[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class LowerGates:
    """Lower every gate for given selections.

    Args:
        kept: sorted kept indices by site name.
    """

    kept: Mapping[str, Tensor] = field(repr=False)

    name = "lower-gates"
    requires = "gated"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph and slice the tensors of this program."""
        masks = {site.name: kept_features(site, self.kept[site.name]) for site in program.sites}
        differing = _cut_dimensions(program, masks)
        cut = {dimension: stays if stays.ndim == 1 else stays[0] for dimension, stays in differing.items()}
        lowering = _Lowering(program, masks, cut)
        for index, site in enumerate(program.sites):
            for at, point in enumerate(site.gates):
                lowering.gate(site, point, f"gate_{index}_{at}")
        lowering.tensors |= count_sizes(program, cut)
        for node in list(program.graph.nodes):
            if node.op == "placeholder" and node.name.startswith("mask_"):
                _erase_with_users(program.graph, node)
        program.rebuild(lowering.tensors | _sliced_tensors(program, differing))
        narrowed = sum(not bool(mask.all()) for mask in masks.values())
        return PassResult(True, f"{narrowed} of {len(masks)} sites narrowed")


def _cut_dimensions(program: Program, masks: Mapping[str, np.ndarray]) -> Cut:
    """Return which positions stay of every dimension that some site cuts (rule 5)."""
    cut: Cut = {}
    for site in program.sites:
        if masks[site.name].all():
            continue
        for dimension, labels in program.closures[site.name].items():
            stays = kept_positions(labels, masks[site.name])
            cut[dimension] = cut[dimension] & stays if dimension in cut else stays
    return cut


@dataclass
class _Lowering:
    """Gates being lowered, with the index tensors that they need."""

    program: Program
    masks: Mapping[str, np.ndarray]
    cut: Cut

    def __post_init__(self) -> None:
        self.tensors: dict[str, Tensor] = {
            path: tensor for path, tensor in self.program.tensors() if not path.startswith("dispfx_labels.")
        }
        self.nodes = self.program.nodes
        self.device = self.program.device
        self.writes = set(self.program.stream.writes) if self.program.stream else set()

    def gate(self, site: Site, point: GatePoint, name: str) -> None:
        """Replace one gate by its effect on the kept features."""
        gate = self.nodes[name]
        value = operand(gate, 0)
        if point.statistics:
            restore(self.nodes, value, self.nodes[point.users[0]], name)
            return
        narrow = (point.value, point.dim) in self.program.closures[site.name]
        if self.masks[site.name].all():
            gate.replace_all_uses_with(value)
        elif not narrow:
            gate.replace_all_uses_with(self._read(site, point, value))
        elif self._is_write(point):
            self._write(site, point, gate, value)
        else:
            gate.replace_all_uses_with(value)
        self.program.graph.erase_node(gate)

    def _is_write(self, point: GatePoint) -> bool:
        tops = {(leaf.top, leaf.user) for leaf in self.program.leaves}
        return any((point.value, user) in tops for user in point.users)

    def _index(self, site: Site, point: GatePoint) -> fx.Node:
        """Return the node of the kept positions of a gate's dimension."""
        path = f"{INDEX_PREFIX}.{site.name}"
        mask = self.masks[site.name]
        positions = np.flatnonzero(mask)
        if point.labels is not None:
            path = f"{path}_at_{point.value}"
            positions = np.flatnonzero(kept_positions(point.labels, mask))
        if path not in self.tensors:
            self.tensors[path] = torch.from_numpy(positions.astype(np.int32)).to(self.device)
        name = path.replace(".", "_")
        if name in self.nodes:
            return self.nodes[name]
        first = next(iter(self.program.graph.nodes))
        with self.program.graph.inserting_after(first):
            node = self.program.graph.create_node("get_attr", path, name=name)
        node.meta["val"] = torch.empty(len(positions), dtype=torch.int32, device="meta")
        self.nodes[name] = node
        return node

    def _read(self, site: Site, point: GatePoint, value: fx.Node) -> fx.Node:
        index = self._index(site, point)
        with self.program.graph.inserting_after(value):
            read = self.program.graph.call_function(aten.index_select.default, (value, point.dim, index))
        read.meta["val"] = value.meta["val"].narrow(point.dim, 0, index.meta["val"].shape[0])
        return read

    def _write(self, site: Site, point: GatePoint, gate: fx.Node, value: fx.Node) -> None:
        index = self._index(site, point)
        for user in list(gate.users):
            base = _residual_base(user, gate) if user.name in self.writes else None
            with self.program.graph.inserting_before(user):
                if base is None:
                    user.replace_input_with(gate, self._into_zeros(point, gate, value, index))
                    continue
                small = _with_dtype(self.program.graph, value, base)
            # Rewritten in place, so that the stream's facts still name it.
            user.target = aten.index_add.default
            user.args, user.kwargs = (base, point.dim, index, small), {}

    def _into_zeros(self, point: GatePoint, gate: fx.Node, value: fx.Node, index: fx.Node) -> fx.Node:
        """Return the written features at their places among zeros, in the gated value's full shape."""
        graph, full = self.program.graph, gate.meta["val"]
        sizes: list[fx.Node | int] = []
        for dim, size in enumerate(full.shape):
            is_fixed = isinstance(size, int)
            sizes.append(size if is_fixed else graph.call_function(aten.sym_size.int, (value, dim)))
            if not is_fixed:
                sizes[-1].meta["val"] = size  # type: ignore[union-attr]
        zeros = graph.call_function(aten.new_zeros.default, (value, sizes))
        placed = graph.call_function(aten.index_add.default, (zeros, point.dim, index, value))
        zeros.meta["val"] = placed.meta["val"] = full
        return placed


def _residual_base(user: fx.Node, gate: fx.Node) -> fx.Node | None:
    """Return what the gated value is added to, or None where the addition scales its operand."""
    if packet(user) is not aten.add or user.kwargs.get("alpha", 1) != 1:
        return None
    others = [value for value in user.args if value is not gate]
    base = others[0] if len(others) == 1 else None
    if not isinstance(base, fx.Node) or base.meta["val"].dtype != user.meta["val"].dtype:
        return None
    return base


def _with_dtype(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    dtype = like.meta["val"].dtype
    if value.meta["val"].dtype == dtype:
        return value
    cast = graph.call_function(aten.to.dtype, (value, dtype))
    cast.meta["val"] = value.meta["val"].to(dtype)
    return cast


def _erase_with_users(graph: fx.Graph, node: fx.Node) -> None:
    while node.users:
        _erase_with_users(graph, next(iter(node.users)))
    graph.erase_node(node)


def _sliced_tensors(program: Program, cut: Cut) -> dict[str, Tensor]:
    """Return the tensors that some site cuts, cut."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "get_attr"}
    tensors = dict(program.tensors())
    sliced: dict[str, Tensor] = {}
    for (name, dim), stays in cut.items():
        if name not in nodes or stays.all():
            continue
        path = str(nodes[name].target)
        tensor = sliced.get(path, tensors[path])
        narrowed = taken(tensor.detach(), dim, places(stays))
        is_parameter = isinstance(tensors[path], torch.nn.Parameter)
        sliced[path] = torch.nn.Parameter(narrowed, requires_grad=False) if is_parameter else narrowed
    return sliced
