"""Add what a branch wrote, normalise and select in one operation.

    h = add(x, index_select(p, 2, inverse))         t = dispfx::add_norm_select(x, p, inverse, w, …)
    n = norm(h, w)                              →   h = t[0]
    s = index_select(n, 2, index)                   s = t[1]

Rules:
1. The norm is `layer_norm` over the last dimension, or x · rsqrt(mean(x²) + ε) · w, computed in float32
   where the stream is narrower and rounded to it before the weight is multiplied, which `rms_norm` does not
   do.  Any other is left alone.
2. The selection, by indices of a site, is the only user of the norm.
3. `places[i]` is the place of feature i among the kept ones, or −1.
4. The addition comes along where its other operand is a write of `gather-add`; else nothing is added.
The operation rounds where the graph did, so both agree to the rounding of a sum over the width.
"""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dispfx.ir import ops
from dispfx.ir.norms import Norm, norm_of
from dispfx.ir.ops import aten, packet
from dispfx.ir.program import INDEX_PREFIX, Program
from dispfx.kernels.norm_select import ADD_NORM_SELECT
from dispfx.pipeline import PassResult

PLACES_PREFIX = "dispfx_places"
INVERSE_PREFIX = "dispfx_inverse"


@dataclass(frozen=True)
class FuseNorms:
    """Make one operation of write, norm and selection."""

    name = "fuse-norms"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        tensors = dict(program.tensors())
        found = []
        for node in list(program.graph.nodes):
            norm = _selected_norm(node)
            if norm is not None:
                _fuse(program.graph, node, norm, tensors)
                found.append(node)
        if found:
            program.rebuild(tensors)
        return PassResult(bool(found), f"{len(found)} norms")


def _selected_norm(select: fx.Node) -> Norm | None:
    """Return the norm whose features a node selects, or None (rules 1 and 2)."""
    if packet(select) is not aten.index_select or select.args[1] != ops.rank(select) - 1:
        return None
    value, _, index = select.args
    assert isinstance(value, fx.Node) and isinstance(index, fx.Node)
    if not str(index.target).startswith(f"{INDEX_PREFIX}.") or len(value.users) != 1:
        return None
    norm = norm_of(value, lambda operand: operand.op == "get_attr")
    return norm if norm is not None and _fits(norm) else None


def _fits(norm: Norm) -> bool:
    """Whether the operation computes such a norm (rule 1)."""
    dtype = norm.value.meta["val"].dtype
    is_exact = dtype in (torch.float32, torch.float64)
    return not norm.is_rms or (norm.weight.meta["val"].dtype == dtype and (norm.rounds or is_exact))


def _fuse(graph: fx.Graph, select: fx.Node, norm: Norm, tensors: dict[str, Tensor]) -> None:
    index = select.args[2]
    assert isinstance(index, fx.Node)
    kept = tensors[str(index.target)]
    total = norm.value
    x, written, inverse = _addition(total) or (total, None, None)
    with graph.inserting_before(total if written is not None else select):
        places = _places(graph, str(index.target), kept, ops.shape_of(total)[-1], tensors)
        arguments = (x, written, inverse, norm.weight, norm.bias, places, len(kept), norm.eps, norm.is_rms)
        both = graph.call_function(ADD_NORM_SELECT, arguments)
        both.meta["val"] = (total.meta["val"], select.meta["val"])
    users = [(select, 1)] + ([(total, 0)] if written is not None else [])
    for node, place in users:
        # Rewritten in place, so that the stream's facts go on naming it.
        node.target = operator.getitem
        node.args, node.kwargs = (both, place), {}


def _addition(total: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return x, p and inverse where a value is x + p[inverse], a write that nothing else uses."""
    if packet(total) is not aten.add or len(total.args) != 2 or total.kwargs:
        return None
    for base, gathered in (total.args, total.args[::-1]):
        if not isinstance(base, fx.Node) or not isinstance(gathered, fx.Node):
            continue
        if packet(gathered) is not aten.index_select or len(gathered.users) != 1:
            continue
        written, dim, inverse = gathered.args
        assert isinstance(written, fx.Node) and isinstance(inverse, fx.Node)
        of_site = str(inverse.target).startswith(f"{INVERSE_PREFIX}.")
        alike = base.meta["val"].shape == total.meta["val"].shape
        types = {value.meta["val"].dtype for value in (base, written, total)}
        if of_site and alike and len(types) == 1 and dim == ops.rank(total) - 1:
            return base, written, inverse
    return None


def _places(graph: fx.Graph, path: str, kept: Tensor, width: int, tensors: dict[str, Tensor]) -> fx.Node:
    target = PLACES_PREFIX + path.removeprefix(INDEX_PREFIX)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == target:
            return node
    places = torch.full((width,), -1, dtype=torch.int32, device=kept.device)
    places[kept.long()] = torch.arange(len(kept), dtype=torch.int32, device=kept.device)
    tensors[target] = places
    with graph.inserting_after(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target, name=target.replace(".", "_"))
    node.meta["val"] = torch.empty(width, dtype=torch.int32, device="meta")
    return node
