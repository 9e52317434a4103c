"""Rules of pointwise operations, reductions, norms, and operations that order a dimension."""

from torch import fx

from dispfx.analysis.links.connections import (
    Connection,
    Free,
    Mixing,
    aligned,
    dimension,
    same,
    tensor_operands,
)
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, operand, packet, rank


def pointwise(node: fx.Node) -> list[Connection]:
    return [link for value in tensor_operands(node) for link in aligned(value, node)]


def first_only(node: fx.Node) -> list[Connection]:
    return aligned(operand(node, 0), node)


def factory(node: fx.Node) -> list[Connection]:
    """Every position of a constant is alike."""
    return [Free((node, dim)) for dim in range(rank(node))]


# Norms take the order of the norm before the dimensions.
_SIZED = ops.packets("new_ones new_zeros new_full new_empty")
_ORDER_FIRST = ops.packets("norm linalg_vector_norm")


def metadata_only(node: fx.Node) -> list[Connection]:
    """The result's values do not depend on the operand: its dimensions have the same sizes, or are free.

    A size that is asked for depends on the dimension that it is the size of, and on no other.
    """
    value = next((value for value in node.all_input_nodes if ops.is_tensor(value)), None)
    like = packet(node) in (aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
    if value is not None and like:
        return aligned(value, node)
    if value is not None and not ops.is_tensor(node):
        asked = argument(node, 1, "dim") if packet(node) is aten.sym_size else None
        return [Mixing((value, dim)) for dim in ([asked] if isinstance(asked, int) else range(rank(value)))]
    fixed = packet(node) in _SIZED and ops.is_tensor(node)
    return [Free((node, dim)) for dim in range(rank(node))] if fixed else []


def reduction(call: fx.Node, result: fx.Node | None = None) -> list[Connection]:
    """A reduction mixes the dimensions it removes; `max` and `min` of two tensors are pointwise.

    Args:
        result: one of several tensors that the call gives; the call's own by default.
    """
    value, node = operand(call, 0), result or call
    if len(tensor_operands(call)) == 2:
        return pointwise(call)
    at = 2 if packet(call) in _ORDER_FIRST else 1
    dims = argument(call, at, "dim")
    listed = dims if isinstance(dims, list | tuple) else [dims]
    reduced = {dimension(value, dim) for dim in listed} if dims not in (None, []) else set(range(rank(value)))
    average = packet(call) in ops.AVERAGES
    found: list[Connection] = [Mixing((value, dim), average) for dim in sorted(reduced)]
    if not ops.is_tensor(node):
        return found
    keeps = rank(node) == rank(value)
    left = [dim for dim in range(rank(value)) if dim not in reduced]
    for position, dim in enumerate(left):
        found += same(value, dim, node, dim if keeps else position)
    return found


def ordered(call: fx.Node, result: fx.Node | None = None) -> list[Connection]:
    """A softmax, a scan or a sort along one dimension; other dimensions pass through."""
    value, node = operand(call, 0), result or call
    at = 2 if packet(call) is aten.topk else 1
    mixed = dimension(value, argument(call, at, "dim", -1))
    found: list[Connection] = [Mixing((value, mixed))]
    if ops.is_tensor(node):
        found += [link for dim in range(rank(value)) if dim != mixed for link in same(value, dim, node, dim)]
    return found


def norm(node: fx.Node) -> list[Connection]:
    """A fused norm mixes its trailing dimensions; weight and bias follow them."""
    value, shape = operand(node, 0), argument(node, 1, "normalized_shape")
    assert isinstance(shape, list | tuple)
    first = rank(value) - len(shape)
    found: list[Connection] = [Mixing((value, dim)) for dim in range(first, rank(value))]
    if not ops.is_tensor(node):
        return found
    return found + [link for operand in tensor_operands(node) for link in aligned(operand, node)]
