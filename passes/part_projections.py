"""Take the parts of a fused projection before heads get a dimension of their own.

    v = reshape(x, [B, T, H, 3, F])           m = reshape(x, [B, T, H, 3 · F])
    q = select(v, 3, 0)                  →    q = slice(m, 3, 0, F)
    k = slice(v, 3, 1, 2)                     k = unflatten(slice(m, 3, F, 2 · F), 3, [1, F])

Before, a feature of `v` is one of queries, keys and values at once, so values alone cannot be cut.
Rules:
1. Every user of the reshape, or `unflatten`, takes neighbouring positions of its last but one dimension:
   by `select`, by `slice` or by an index that is a constant.  The last two dimensions have fixed sizes.
2. With other users, or in decoders whose values are not to be pruned, the graph stays as it is.
The same numbers stand at the same places, so no bit changes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from dispfx.analysis.links import slice_positions
from dispfx.analysis.links.places import indexed_by_constant
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, operand, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program
from dispfx.settings.sections import BudgetSettings, FurtherSites


@dataclass(frozen=True)
class PartProjections:
    """Take the parts of fused projections before their heads are split.

    Args:
        sites: what is pruned besides the paper's selections; values need this.
    """

    sites: tuple[FurtherSites, ...] | FurtherSites = BudgetSettings.sites

    name = "part-projections"
    requires = "canonical"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        found: dict[fx.Node, dict[fx.Node, np.ndarray]] = {}
        if "attention-values" in self.sites:
            found = {node: parts for node in program.graph.nodes if (parts := _parts(node))}
        for whole, parts in found.items():
            _part(program.graph, whole, parts)
        if found:
            program.rebuild(dict(program.tensors()))
        return PassResult(bool(found), f"{len(found)} projections taken apart")


def _parts(node: fx.Node) -> dict[fx.Node, np.ndarray]:
    """Return the positions that each user of a reshape takes; nothing where one does otherwise (rule 1)."""
    last = ops.rank(node) - 1 if _is_split(node) else 0
    if last < 2 or any(ops.is_dynamic(node, dim) for dim in (last - 1, last)):
        return {}
    parts = {user: _positions(user, last - 1) for user in node.users}
    taken = {user: places for user, places in parts.items() if places is not None and len(places)}
    adjacent = all(np.array_equal(places, places[0] + np.arange(len(places))) for places in taken.values())
    return taken if adjacent and len(taken) == len(parts) else {}


def _positions(user: fx.Node, dim: int) -> np.ndarray | None:
    """Return the positions of a dimension that a node takes, or None where it does something else."""
    if packet(user) in ops.GATHERS:
        found = indexed_by_constant(user)
        return found[1] if found is not None and found[0] == dim else None
    if packet(user) not in (aten.select, aten.slice):
        return None
    value = operand(user, 0)
    if argument(user, 1, "dim", 0) % ops.rank(value) != dim:  # type: ignore[operator]
        return None
    if packet(user) is aten.slice:
        fixed = all(not isinstance(bound, fx.Node) for bound in (*user.args[2:], *user.kwargs.values()))
        return slice_positions(user) if fixed else None
    at, size = argument(user, 2, "index"), ops.shape_of(value)[dim]
    return np.array([at % size]) if isinstance(at, int) else None


def _part(graph: fx.Graph, whole: fx.Node, parts: dict[fx.Node, np.ndarray]) -> None:
    last = ops.rank(whole) - 2
    size = ops.shape_of(whole)[-1]
    with graph.inserting_before(whole):
        merged = _merged(graph, whole)
    for user, places in parts.items():
        begin, end = int(places[0]) * size, (int(places[-1]) + 1) * size
        with graph.inserting_before(user):
            part = _call(graph, user, aten.slice.Tensor, merged, last, begin, end)
            if packet(user) is not aten.select:
                part = _call(graph, user, aten.unflatten.int, part, last, [len(places), size])
        user.replace_all_uses_with(part)
        graph.erase_node(user)
    graph.erase_node(whole)


def _merged(graph: fx.Graph, whole: fx.Node) -> fx.Node:
    """Return what a reshape gives if its last two dimensions are one."""
    factor = ops.shape_of(whole)[-2] * ops.shape_of(whole)[-1]
    value = operand(whole, 0)
    if packet(whole) is aten.reshape:
        *around, _, _ = argument(whole, 1, "shape")  # type: ignore[misc]
        return _call(graph, whole, aten.reshape.default, value, [*around, factor])
    *before, _, _ = argument(whole, 2, "sizes")  # type: ignore[misc]
    dim = ops.rank(value) - 1
    return _call(graph, whole, aten.unflatten.int, value, dim, [*before, factor]) if before else value


def _is_split(node: fx.Node) -> bool:
    """Whether a node reshapes, and gives its last two dimensions by itself."""
    if packet(node) is not aten.unflatten:
        return packet(node) is aten.reshape
    dim, sizes = argument(node, 1, "dim"), argument(node, 2, "sizes")
    is_last = dim in (-1, ops.rank(operand(node, 0)) - 1)
    return is_last and isinstance(sizes, list | tuple) and len(sizes) > 1


def _call(graph: fx.Graph, like: fx.Node, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
    """Return a node from the line of another one."""
    node = graph.call_function(target, args)
    values = map_arg(args, lambda source: source.meta["val"])
    node.meta = {**like.meta, "val": target(*values)}
    return node
