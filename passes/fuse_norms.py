"""Add what a branch wrote, normalise and select in one operation.

    h = add(x, index_select(p, 2, inverse))         t = dispfx::add_norm_select(x, p, inverse, w, …)
    n = norm(h, w)                              →   h = t[0]
    s = index_select(n, 2, index)                   s = t[1]

Rules:
1. The norm is `layer_norm` over the last dimension, or x · rsqrt(mean(x²) + ε) · w, computed in float32
   where the stream is narrower and rounded to it before the weight is multiplied.  Any other is left alone.
2. The selection, by indices of a site, is the only user of the norm.
3. `places[i]` is the place of feature i among the kept ones, or −1.
4. The addition comes along where its other operand is a write of `gather-add`; else nothing is added.
The operation rounds where the graph did, so both agree to the rounding of a sum over the width.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, packet
from dispfx.ir.program import INDEX_PREFIX, Program
from dispfx.kernels.norm_select import ADD_NORM_SELECT
from dispfx.pipeline import PassResult

PLACES_PREFIX = "dispfx_places"
INVERSE_PREFIX = "dispfx_inverse"


@dataclass(frozen=True)
class Norm:
    """A norm that was recognised: of which value, with which weights."""

    value: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    eps: float
    is_rms: bool


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
    return _layer_norm(value) or _rms_norm(value)


def _layer_norm(value: fx.Node) -> Norm | None:
    if packet(value) is not aten.layer_norm:
        return None
    x, shape, weight = value.args[:3] if len(value.args) > 2 else (None, None, None)
    bias, eps = argument(value, 3, "bias"), argument(value, 4, "eps", 1e-5)
    is_plain = isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(eps, float)
    if not is_plain or list(shape) != [ops.shape_of(x)[-1]]:  # type: ignore[call-overload]
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and isinstance(eps, float)
    return Norm(x, weight, bias if isinstance(bias, fx.Node) else None, eps, is_rms=False)


def _rms_norm(value: fx.Node) -> Norm | None:
    """Match weight · rounded(x · rsqrt(mean(x²) + ε))."""
    pair = _split(value, lambda operand: operand.op == "get_attr")
    if pair is None:
        return None
    weight, scaled = pair
    dtype = value.meta["val"].dtype
    scaled = _uncast(scaled)
    pair = _split(scaled, lambda operand: packet(operand) is aten.rsqrt)
    if pair is None:
        return None
    inverse_root, whole = pair
    eps = _eps_of_mean_square(inverse_root, whole)
    x = _uncast(whole)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    fits = x.meta["val"].dtype == dtype == weight.meta["val"].dtype and whole.meta["val"].dtype == exact
    is_vector = ops.shape_of(weight) == ops.shape_of(value)[-1:]
    return Norm(x, weight, None, eps, is_rms=True) if eps is not None and fits and is_vector else None


def _split(node: fx.Node, is_first: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node] | None:
    """Return the operands of a product of two values, the one that fits first."""
    operands = [value for value in node.args if isinstance(value, fx.Node)]
    if packet(node) is not aten.mul or len(operands) != 2:
        return None
    for first, second in (operands, operands[::-1]):
        if is_first(first):
            return first, second
    return None


def _uncast(node: fx.Node) -> fx.Node:
    operand = node.args[0] if packet(node) in ops.CASTS else None
    return operand if isinstance(operand, fx.Node) else node


def _eps_of_mean_square(inverse_root: fx.Node, whole: fx.Node) -> float | None:
    """Return ε where a value is rsqrt(mean(whole², −1) + ε), else None."""
    shifted = inverse_root.args[0]
    if not isinstance(shifted, fx.Node) or packet(shifted) is not aten.add:
        return None
    mean, eps = shifted.args[0], shifted.args[1]
    if not isinstance(mean, fx.Node) or packet(mean) is not aten.mean or not isinstance(eps, float):
        return None
    square, dims = mean.args[0], list(argument(mean, 1, "dim", []))  # type: ignore[call-overload]
    last = dims in ([-1], [ops.rank(whole) - 1]) and argument(mean, 2, "keepdim", False)
    is_square = isinstance(square, fx.Node) and packet(square) is aten.pow and square.args == (whole, 2)
    return eps if last and is_square else None


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
