"""Which positions of an operation's operands and result are the same feature.

Entry point: `links(node)`.  One rule an operation says how it connects dimensions; `dispfx.ir.closure`
walks these connections and knows no operation itself.

Kinds of connection:
    Link         position `a_positions[i]` of one dimension is position `b_positions[i]` of another
    Contraction  a product sums over both dimensions together
    Mixing       the operation combines all positions of a dimension (a softmax, a norm, a mean)

A dimension without a connection is unrelated to every other one, which is right for a broadcast.
An operation without a rule gives None: it is opaque.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import aten, argument, packet, rank, shape_of

Dimension: TypeAlias = tuple[fx.Node, int]
Positions: TypeAlias = np.ndarray | None


@dataclass(frozen=True, eq=False)
class Link:
    """Two dimensions that share features; positions are None where position i matches position i."""

    a: Dimension
    b: Dimension
    a_positions: Positions = None
    b_positions: Positions = None


@dataclass(frozen=True, eq=False)
class Alternatives:
    """A dimension that a reshape splits: its features follow one of the factors, or none."""

    whole: Dimension
    factors: tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class Contraction:
    """A product sums over dimension `a` of one operand and `b` of another."""

    a: Dimension
    b: Dimension


@dataclass(frozen=True, eq=False)
class Mixing:
    """All positions of a dimension enter each result; `average` where the result divides a sum."""

    operand: Dimension
    average: bool = False


Connection: TypeAlias = Link | Alternatives | Contraction | Mixing


def links(node: fx.Node) -> list[Connection] | None:
    """Return how `node` connects the dimensions of its operands and its result.

    None means that no rule is known.  Values that are not tensors connect nothing.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    rule = _RULES.get(packet(node))  # type: ignore[arg-type]
    if rule is not None:
        return rule(node)
    if ops.is_pointwise(node):
        return _pointwise(node)
    return None


def _same(a: fx.Node, a_dim: int, b: fx.Node, b_dim: int) -> list[Connection]:
    """Link two dimensions position by position, unless one of them is broadcast."""
    size = shape_of(a)[a_dim]
    return [Link((a, a_dim), (b, b_dim))] if size == shape_of(b)[b_dim] and size != 1 else []


def _aligned(value: fx.Node, node: fx.Node, *, but_last: int = 0) -> list[Connection]:
    """Link dimensions from the right, the last `but_last` of both left out."""
    found: list[Connection] = []
    for back in range(1 + but_last, min(rank(value), rank(node)) + 1):
        found += _same(value, rank(value) - back, node, rank(node) - back)
    return found


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [value for value in ops.operands(node) if ops.is_tensor(value)]


def _pointwise(node: fx.Node) -> list[Connection]:
    return [link for value in _tensors(node) for link in _aligned(value, node)]


def _first_only(node: fx.Node) -> list[Connection]:
    return _aligned(_node(node, 0), node)


def _metadata_only(node: fx.Node) -> list[Connection]:
    """The result's values do not depend on the operand, but its dimensions have the same sizes."""
    value = next((value for value in node.all_input_nodes if ops.is_tensor(value)), None)
    like = packet(node) in (aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
    return _aligned(value, node) if value is not None and like else []


def _node(node: fx.Node, index: int) -> fx.Node:
    value = node.args[index]
    assert isinstance(value, fx.Node)
    return value


def _dim(value: fx.Node, dim: object) -> int:
    assert isinstance(dim, int)
    return dim % max(rank(value), 1)


# Products -----------------------------------------------------------------------------------------


def _linear(node: fx.Node) -> list[Connection]:
    x, weight = _node(node, 0), _node(node, 1)
    bias = argument(node, 2, "bias")
    out = rank(node) - 1
    found = [link for dim in range(out) for link in _same(x, dim, node, dim)]
    found += _same(weight, 0, node, out)
    if isinstance(bias, fx.Node):
        found += _same(bias, 0, node, out)
    return [*found, Contraction((x, rank(x) - 1), (weight, 1))]


def _matrix_product(node: fx.Node, first: int = 0) -> list[Connection]:
    a, b = _node(node, first), _node(node, first + 1)
    if rank(a) < 2 or rank(b) < 2:
        return [*_vector_product(node, a, b)]
    found = _aligned(a, node, but_last=2) + _aligned(b, node, but_last=2)
    found += _same(a, rank(a) - 2, node, rank(node) - 2)
    found += _same(b, rank(b) - 1, node, rank(node) - 1)
    return [*found, Contraction((a, rank(a) - 1), (b, rank(b) - 2))]


def _vector_product(node: fx.Node, a: fx.Node, b: fx.Node) -> list[Connection]:
    found: list[Connection] = [Contraction((a, rank(a) - 1), (b, max(rank(b) - 2, 0)))]
    if rank(a) > 1:
        found += [link for dim in range(rank(a) - 1) for link in _same(a, dim, node, dim)]
    if rank(b) > 1:
        found += _same(b, rank(b) - 1, node, rank(node) - 1)
    return found


def _with_addend(node: fx.Node) -> list[Connection]:
    return _aligned(_node(node, 0), node) + _matrix_product(node, first=1)


def _einsum(node: fx.Node) -> list[Connection] | None:
    equation, values = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(values, list | tuple)
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    inputs, result = equation.split("->")
    terms = inputs.split(",")
    where = [(value, term) for value, term in zip(values, terms, strict=True)]
    found: list[Connection] = []
    for letter in sorted(set(inputs) - {","}):
        holders = [(value, term.index(letter)) for value, term in where if letter in term]
        if letter in result:
            out = result.index(letter)
            found += [link for value, dim in holders for link in _same(value, dim, node, out)]
        elif len(holders) == 2:
            found.append(Contraction(*holders))
        else:
            found += [Mixing(holder) for holder in holders]
    return found


def _attention(node: fx.Node) -> list[Connection]:
    query, key, value = (_node(node, index) for index in range(3))
    last, tokens = rank(node) - 1, rank(node) - 2
    found = _same(query, tokens, node, tokens) + _same(value, rank(value) - 1, node, last)
    for operand in (query, key, value):
        found += _aligned(operand, node, but_last=2)
    found.append(Contraction((query, rank(query) - 1), (key, rank(key) - 1)))
    return [*found, Contraction((key, rank(key) - 2), (value, rank(value) - 2))]


def _embedding(node: fx.Node) -> list[Connection]:
    weight, ids = _node(node, 0), _node(node, 1)
    found = [link for dim in range(rank(ids)) for link in _same(ids, dim, node, dim)]
    return found + _same(weight, 1, node, rank(node) - 1)


# Reductions and norms -----------------------------------------------------------------------------


def _reduction(node: fx.Node) -> list[Connection]:
    value = _node(node, 0)
    dims = argument(node, 1, "dim")
    listed = dims if isinstance(dims, list | tuple) else [dims]
    reduced = {_dim(value, dim) for dim in listed} if dims not in (None, []) else set(range(rank(value)))
    average = packet(node) in ops.AVERAGES
    found: list[Connection] = [Mixing((value, dim), average) for dim in sorted(reduced)]
    if not ops.is_tensor(node):
        return found
    keeps = rank(node) == rank(value)
    left = [dim for dim in range(rank(value)) if dim not in reduced]
    for position, dim in enumerate(left):
        found += _same(value, dim, node, dim if keeps else position)
    return found


def _ordered(node: fx.Node) -> list[Connection]:
    """A softmax, a scan or a sort along one dimension; the others pass through."""
    value = _node(node, 0)
    at = 2 if packet(node) is aten.topk else 1
    mixed = _dim(value, argument(node, at, "dim", -1))
    found: list[Connection] = [Mixing((value, mixed))]
    if ops.is_tensor(node):
        found += [link for dim in range(rank(value)) if dim != mixed for link in _same(value, dim, node, dim)]
    return found


def _norm(node: fx.Node) -> list[Connection]:
    """A fused norm mixes its trailing dimensions; weight and bias follow them."""
    value, shape = _node(node, 0), argument(node, 1, "normalized_shape")
    assert isinstance(shape, list | tuple)
    first = rank(value) - len(shape)
    found: list[Connection] = [Mixing((value, dim)) for dim in range(first, rank(value))]
    return found + [link for operand in _tensors(node) for link in _aligned(operand, node)]


# Shapes -------------------------------------------------------------------------------------------


def _moved(node: fx.Node) -> list[Connection]:
    """A transpose or permute: dimension `order[i]` becomes dimension i."""
    value = _node(node, 0)
    order = list(range(rank(value)))
    if packet(node) is aten.permute:
        order = [_dim(value, dim) for dim in argument(node, 1, "dims")]  # type: ignore[union-attr]
    elif packet(node) in (aten.t, aten.numpy_T):
        order.reverse()
    else:
        a, b = _dim(value, node.args[1]), _dim(value, node.args[2])
        order[a], order[b] = order[b], order[a]
    return [link for to, dim in enumerate(order) for link in _same(value, dim, node, to)]


def _reshaped(node: fx.Node) -> list[Connection]:
    """A reshape links groups of dimensions of equal product, from the left.

    1. One dimension on both sides: a link.
    2. One dimension on one side: it is the product of the factors on the other side.
    3. Several on both sides: their features cannot be told apart, so they mix.
    """
    value = _node(node, 0)
    found: list[Connection] = []
    for before, after in _groups(shape_of(value), shape_of(node)):
        wide = [dim for dim in before if shape_of(value)[dim] != 1]
        narrow = [dim for dim in after if shape_of(node)[dim] != 1]
        if len(wide) == 1 and len(narrow) == 1:
            found += _same(value, wide[0], node, narrow[0])
        elif len(wide) == 1:
            found.append(_factored(value, wide[0], node, narrow))
        elif len(narrow) == 1:
            found.append(_factored(node, narrow[0], value, wide))
        else:
            found += [Mixing((value, dim)) for dim in wide] + [Mixing((node, dim)) for dim in narrow]
    return found


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dimensions whose sizes have the same product."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        while (a := _product(before, left)) != (b := _product(after, right)):
            if a < b:
                left.append(i + len(left))
            else:
                right.append(j + len(right))
        i, j = i + len(left), j + len(right)
        groups.append((left, right))
    return groups


def _product(sizes: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(sizes[dim] for dim in dims)


def _factored(whole: fx.Node, dim: int, parts: fx.Node, dims: Sequence[int]) -> Alternatives:
    """Say which position of each factor a position of the whole dimension has."""
    sizes = [shape_of(parts)[part] for part in dims]
    index = np.unravel_index(np.arange(shape_of(whole)[dim]), sizes)
    everything = np.arange(shape_of(whole)[dim])
    factors = tuple(
        Link((whole, dim), (parts, part), everything, positions)
        for part, positions in zip(dims, index, strict=True)
    )
    return Alternatives((whole, dim), factors)


def _expanded(node: fx.Node) -> list[Connection]:
    return _aligned(_node(node, 0), node)


def _sliced(node: fx.Node) -> list[Connection]:
    value = _node(node, 0)
    dim = _dim(value, argument(node, 1, "dim", 0))
    found = [link for other in range(rank(value)) if other != dim for link in _same(value, other, node, other)]
    if ops.is_dynamic(value, dim):
        return found
    return [*found, Link((value, dim), (node, dim), slice_positions(node), np.arange(shape_of(node)[dim]))]


def slice_positions(node: fx.Node) -> np.ndarray:
    """Return the positions of the operand that a slice keeps."""
    size = shape_of(_node(node, 0))[_dim(_node(node, 0), argument(node, 1, "dim", 0))]
    start, stop, step = (argument(node, index, name) for index, name in ((2, "start"), (3, "end"), (4, "step")))
    return np.arange(size)[slice(start, stop, step)]


def _selected(node: fx.Node) -> list[Connection]:
    value = _node(node, 0)
    gone = _dim(value, node.args[1])
    left = [dim for dim in range(rank(value)) if dim != gone]
    found = [link for to, dim in enumerate(left) for link in _same(value, dim, node, to)]
    return [*found, Mixing((value, gone))] if shape_of(value)[gone] != 1 else found


def _item(node: fx.Node) -> list[Connection] | None:
    """One result of a split, chunk or unbind."""
    many, index = _node(node, 0), node.args[1]
    rule = _ITEM_RULES.get(packet(many))  # type: ignore[arg-type]
    return rule(node, many, index) if rule is not None and isinstance(index, int) else None


def _split_item(node: fx.Node, many: fx.Node, index: int) -> list[Connection]:
    value = _node(many, 0)
    dim = _dim(value, argument(many, 2, "dim", 0))
    sizes = [ops.size_hint(part.shape[dim]) for part in many.meta["val"]]
    start = sum(sizes[:index])
    found = [link for other in range(rank(value)) if other != dim for link in _same(value, other, node, other)]
    return [*found, Link((value, dim), (node, dim), np.arange(start, start + sizes[index]), np.arange(sizes[index]))]


def _unbind_item(node: fx.Node, many: fx.Node, index: int) -> list[Connection]:
    value = _node(many, 0)
    gone = _dim(value, argument(many, 1, "dim", 0))
    left = [dim for dim in range(rank(value)) if dim != gone]
    found = [link for to, dim in enumerate(left) for link in _same(value, dim, node, to)]
    return [*found, Mixing((value, gone))]


def _joined(node: fx.Node) -> list[Connection]:
    values = node.args[0]
    assert isinstance(values, list | tuple)
    dim = _dim(node, argument(node, 1, "dim", 0))
    found: list[Connection] = []
    start = 0
    for value in values:
        assert isinstance(value, fx.Node)
        size = shape_of(value)[dim]
        found += [link for other in range(rank(node)) if other != dim for link in _same(value, other, node, other)]
        found.append(Link((value, dim), (node, dim), np.arange(size), np.arange(start, start + size)))
        start += size
    return found


def _gated_half(node: fx.Node) -> list[Connection]:
    value = _node(node, 0)
    dim = _dim(value, argument(node, 1, "dim", -1))
    half = shape_of(node)[dim]
    found = [link for other in range(rank(value)) if other != dim for link in _same(value, other, node, other)]
    return [*found, Link((value, dim), (node, dim), np.arange(2 * half), np.arange(2 * half) % half)]


def _indexed(node: fx.Node) -> list[Connection] | None:
    """`x[i, …]` by index tensors on leading dimensions: trailing dimensions pass through."""
    value, indices = _node(node, 0), node.args[1]
    assert isinstance(indices, list | tuple)
    taken = [dim for dim, index in enumerate(indices) if index is not None]
    if taken != list(range(len(taken))):
        return None
    found: list[Connection] = [Mixing((value, dim)) for dim in taken]
    shift = rank(node) - rank(value)
    for dim in range(len(taken), rank(value)):
        found += _same(value, dim, node, dim + shift)
    return found


def _index_select(node: fx.Node) -> list[Connection]:
    value = _node(node, 0)
    taken = _dim(value, node.args[1])
    found = [link for dim in range(rank(value)) if dim != taken for link in _same(value, dim, node, dim)]
    return [*found, Mixing((value, taken))]


_RULES: dict[object, Callable[[fx.Node], list[Connection] | None]] = {
    aten.linear: _linear,
    aten.matmul: _matrix_product,
    aten.mm: _matrix_product,
    aten.bmm: _matrix_product,
    aten.addmm: _with_addend,
    aten.baddbmm: _with_addend,
    aten.einsum: _einsum,
    aten.scaled_dot_product_attention: _attention,
    aten.embedding: _embedding,
    aten.transpose: _moved,
    aten.swapaxes: _moved,
    aten.permute: _moved,
    aten.t: _moved,
    aten.numpy_T: _moved,
    aten.expand: _expanded,
    aten.slice: _sliced,
    aten.select: _selected,
    operator.getitem: _item,
    aten.cat: _joined,
    aten.glu: _gated_half,
    aten.index: _indexed,
    aten.index_select: _index_select,
    aten.type_as: _first_only,
    **dict.fromkeys(ops.VIEWS, _reshaped),
    **dict.fromkeys(ops.REDUCTIONS, _reduction),
    **dict.fromkeys(ops.ORDERED, _ordered),
    **dict.fromkeys(ops.NORMS - ops._packets("group_norm"), _norm),
    **dict.fromkeys(ops.METADATA_ONLY, _metadata_only),
}

_ITEM_RULES: dict[object, Callable[[fx.Node, fx.Node, int], list[Connection]]] = {
    aten.unbind: _unbind_item,
    **{op: _split_item for op in ops.MULTIPLE if op is not aten.unbind},
}
