"""Multiply what every site keeps by one number per feature, on the lowered graph.

    s = index_select(norm, 2, index)          s = index_select(norm, 2, index)
    y = linear(s, w)                     →    m = to(mul(s, view(scale, [K])), dtype)
                                              y = linear(m, w)

Rules:
1. A site's numbers are the parameter `dispfx_scale.<site>`, float32 (K,) of its kept features, ones at first.
2. They multiply where the site's gates were: what a read or an inner site gives to its products, and what a
   write gives to the residual stream, before it is put at its places.
3. Where positions do not follow features one to one, each has the number of its feature; positions that
   follow none have one.  Positions that another site cuts, as values cut those of heads, are left out.
4. Left alone are sites of the whole stream, sites whose stacked experts have features of their own, and sites
   whose gate cannot be found in the lowered graph any more, such as values after the numbers of heads.
   Means and norms over a site's features are no place for a number: what they see stays as it is.
5. The product is taken in float32 and rounded once.
`dispfx.compiler.scales` folds the numbers into the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx, nn

from dispfx.analysis.positions import kept_by_all, kept_features
from dispfx.ir import ops
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import INDEX_PREFIX, Program
from dispfx.ir.sites import STREAM, UNTOUCHED, GatePoint, Site

SCALE_PREFIX = "dispfx_scale"
# From a write's value to the addition that takes it: a cast, and its place among zeros.
_TO_ITS_PLACE = frozenset({aten.to, aten.index_add})

Edge = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class InsertScales:
    """Insert the scales of every site that can have some.

    Args:
        kept: sorted kept indices by site name.
    """

    kept: Mapping[str, Tensor] = field(repr=False)

    name = "insert-scales"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place; it owns the scales."""
        tensors = dict(program.tensors())
        nodes, device = program.nodes, program.device
        masks = {site.name: kept_features(site, self.kept[site.name]) for site in program.sites}
        scaled = 0
        for site in program.sites:
            edges = _edges(nodes, site)
            if not edges:
                continue
            path = f"{SCALE_PREFIX}.{site.name}"
            mask = masks[site.name]
            tensors[path] = nn.Parameter(torch.ones(int(mask.sum()), device=device))
            scale = _read(program.graph, path, tensors[path])
            for point, found in edges:
                spread = scale
                labels = _labels_left(program, point, masks, mask)
                if labels is not None:
                    spread = _by_label(
                        program.graph, scale, f"{path}_at_{point.value}", labels, mask, tensors
                    )
                for value, user in found:
                    _multiply(program.graph, value, user, spread, point.dim)
            scaled += 1
        if scaled:
            program.rebuild(tensors)
        return PassResult(bool(scaled), f"{scaled} of {len(program.sites)} sites")


def _edges(nodes: Mapping[str, fx.Node], site: Site) -> list[tuple[GatePoint, list[Edge]]]:
    """Return for each gate of a site where its value is taken, or nothing for a site left alone (rule 4)."""
    if site.kind == STREAM or site.is_stacked:
        return []
    found = []
    for point in site.gates:
        if point.statistics or any(_takes_statistics(nodes.get(user)) for user in point.users):
            continue
        if point.rows is not None or point.value not in nodes:
            return []
        edges = [_edge(nodes.get(user), nodes[point.value], site) for user in point.users]
        known = [edge for edge in edges if edge is not None]
        if not known or len(known) < len(edges):
            return []
        found.append((point, list(dict.fromkeys(known))))
    return found


def _takes_statistics(user: fx.Node | None) -> bool:
    return user is not None and packet(user) in ops.AVERAGES | ops.NORMS


def _edge(user: fx.Node | None, value: fx.Node, site: Site) -> Edge | None:
    """Return the narrow value that a user of a gate takes now, and what takes it (rule 2)."""
    if user is None:
        return None
    for taken in user.all_input_nodes:
        if (
            packet(taken) is aten.index_select
            and taken.args[0] is value
            and _is_index_of(taken.args[2], site)
        ):
            return taken, user
    return _way_to(value, user, 3)


def _way_to(value: fx.Node, user: fx.Node, steps: int) -> Edge | None:
    if value in user.all_input_nodes:
        return value, user
    for taken in user.all_input_nodes if steps else ():
        if packet(taken) in _TO_ITS_PLACE and (found := _way_to(value, taken, steps - 1)) is not None:
            return found
    return None


def _is_index_of(index: object, site: Site) -> bool:
    path = f"{INDEX_PREFIX}.{site.name}"
    return isinstance(index, fx.Node) and str(index.target).split("_at_")[0] == path


def _read(graph: fx.Graph, path: str, tensor: Tensor) -> fx.Node:
    first = next(node for node in graph.nodes if node.op == "placeholder")
    with graph.inserting_after(first):
        node = graph.create_node("get_attr", path, name=path.replace(".", "_"))
    node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return node


def _labels_left(
    program: Program, point: GatePoint, masks: Mapping[str, np.ndarray], mask: np.ndarray
) -> np.ndarray | None:
    """Return the features of the positions that are left; None where these are the kept ones in order."""
    at = (point.value, point.dim)
    others = [(of[at], masks[name]) for name, of in program.closures.items() if at in of and name in masks]
    stays = kept_by_all([(point.labels, mask), *others])
    if point.labels is None:
        return None if np.array_equal(stays, mask) else np.flatnonzero(stays)
    return np.asarray(point.labels)[stays]


def _by_label(
    graph: fx.Graph,
    scale: fx.Node,
    path: str,
    labels: np.ndarray,
    mask: np.ndarray,
    tensors: dict[str, Tensor],
) -> fx.Node:
    """Return the number of each position that is left: that of its feature, or one (rule 3)."""
    places = np.where(labels == UNTOUCHED, int(mask.sum()), np.cumsum(mask)[np.maximum(labels, 0)] - 1)
    tensors[path] = torch.from_numpy(places.astype(np.int32)).to(tensors[str(scale.target)].device)
    index = _read(graph, path, tensors[path])
    with graph.inserting_after(index if scale < index else scale):
        padded = graph.call_function(aten.constant_pad_nd.default, (scale, [0, 1], 1.0))
    with graph.inserting_after(padded):
        spread = graph.call_function(aten.index_select.default, (padded, 0, index))
    padded.meta["val"] = torch.empty(int(mask.sum()) + 1, device="meta")
    spread.meta["val"] = torch.empty(len(places), device="meta")
    return spread


def _multiply(graph: fx.Graph, value: fx.Node, user: fx.Node, scale: fx.Node, dim: int) -> None:
    """Let a user take the value times the scale along a dimension (rule 5)."""
    full = value.meta["val"]
    shape = [-1] + [1] * (full.dim() - 1 - dim)
    with graph.inserting_before(user):
        aligned = graph.call_function(aten.view.default, (scale, shape))
        product = graph.call_function(aten.mul.Tensor, (value, aligned))
        rounded = graph.call_function(aten.to.dtype, (product, full.dtype))
    aligned.meta["val"] = scale.meta["val"].view(shape)
    product.meta["val"] = full.float()
    rounded.meta["val"] = full
    user.replace_input_with(value, rounded)
