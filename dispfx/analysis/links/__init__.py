"""Which positions of an operation's operands and result are the same feature.

Entry point: `links(node)`.  One rule per operation says how it connects dimensions;
`dispfx.analysis.label_map` follows these connections, without knowing operations.

Kinds of connection:
    Link         position `a_positions[i]` of one dimension is position `b_positions[i]` of another
    Contraction  a product sums over both dimensions together
    Mixing       the operation combines all positions of a dimension (a softmax, a norm, a mean)
    Free         all positions of a dimension are alike, and the graph spells out how many there are

A dimension that a rule leaves out is Mixing, which refuses the site.  Dimensions of size one are broadcast
and need no connection.  An operation without a rule gives None: it is opaque.

`register` adds a rule for a custom operation (`docs/extending.md`).
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from dispfx.analysis.links import places, products, reductions, shapes
from dispfx.analysis.links.connections import (
    Alternatives,
    Connection,
    Contraction,
    Dimension,
    Free,
    Link,
    Mixing,
    ends,
)
from dispfx.analysis.links.reductions import pointwise
from dispfx.analysis.links.shapes import slice_positions
from dispfx.errors import DispfxError
from dispfx.ir import ops
from dispfx.ir.ops import aten, packet

__all__ = [
    "Alternatives", "Connection", "Contraction", "Dimension", "Free", "Link", "Mixing", "Rule",
    "contractions", "is_registered", "links", "pointwise", "register", "registered_operators",
    "slice_positions",
]  # fmt: skip

Rule = Callable[[fx.Node], list[Connection] | None]


def register(operation: object, rule: Rule) -> None:
    """Register how a custom operation connects dimensions; a second rule replaces the first.

    An operation that keeps every position in place, such as an activation function, has the rule `pointwise`.
    Custom matrix products cannot be pruned: their weights are not cut.

    Args:
        operation: `torch.ops.NAMESPACE.NAME`, or one of its overloads; the rule holds for all overloads.
        rule: takes a node that calls the operation, and returns its connections, or None for no rule.

    Raises:
        DispfxError: if this is not an operation, or dispfx has a rule for it.
    """
    found = getattr(operation, "overloadpacket", operation)
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise DispfxError(
            f"a link rule is for an operation, but a {type(operation).__name__} was given",
            hint="pass torch.ops.NAMESPACE.NAME, as torch.library.custom_op named it",
        )
    if found in _RULES:
        raise DispfxError(f"{found} has a built-in link rule, which cannot be replaced")
    _REGISTERED[found] = rule


def registered_operators() -> set[str]:
    """Return the overloads of operations with a registered rule, such as `torch.ops.mylib.op.default`."""
    return {f"torch.ops.{found}.{overload}" for found in _REGISTERED for overload in found.overloads()}


def is_registered(node: fx.Node) -> bool:
    """Whether a node calls an operation with a registered rule."""
    return packet(node) in _REGISTERED


def links(node: fx.Node) -> list[Connection] | None:
    """Return how `node` connects the dimensions of its operands and its result.

    None means that no rule is known.  Values that are not tensors connect nothing.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if is_registered(node):
        found = _checked(node, _REGISTERED[packet(node)])
        return found if found is None else [*found, *_left_out(node, found)]
    rule = products.grouped if ops.is_grouped(node) else _RULES.get(packet(node))
    if rule is None and ops.is_pointwise(node):
        rule = reductions.pointwise
    found = rule(node) if rule is not None else None
    return found if found is None else [*found, *_left_out(node, found)]


def contractions(node: fx.Node) -> list[Contraction]:
    """Return the pairs of dimensions that a product sums over."""
    return [found for found in links(node) or () if isinstance(found, Contraction)]


def _left_out(node: fx.Node, found: list[Connection]) -> list[Connection]:
    """Return a Mixing for every dimension that a rule leaves out.

    Operands that only give a dtype or a shape do not count: cutting them has no effect here.
    """
    known = {dimension for connection in found for dimension in ends(connection)}
    values = [value for value in (node, *ops.operands(node)) if ops.is_tensor(value)]
    return [
        Mixing((value, dim))
        for value in values
        for dim, size in enumerate(ops.shape_of(value))
        if size != 1 and (value, dim) not in known
    ]


def _checked(node: fx.Node, rule: Rule) -> list[Connection] | None:
    """Return the result of a registered rule, after checking that it names dimensions of the node.

    Raises:
        DispfxError: if the rule raises an error, or returns something else.
    """
    try:
        found = rule(node)
        for connection in found or ():
            _require_connection(connection)
        own = {value: ops.rank(value) for value in (node, *ops.operands(node)) if ops.is_tensor(value)}
        dimensions = [dimension for connection in found or () for dimension in ends(connection)]
        strange = [f"{value}, {dim}" for value, dim in dimensions if not 0 <= dim < own.get(value, 0)]
    except Exception as error:
        raise DispfxError(
            f"the link rule of {packet(node)} raised {type(error).__name__}: {error}", where=str(node)
        ) from error
    if strange:
        raise DispfxError(
            f"the link rule of {packet(node)} names a dimension that does not exist: {strange[0]}",
            where=str(node),
        )
    return found


def _require_connection(found: object) -> None:
    """Raise TypeError unless this is a connection whose positions are arrays of integers."""
    if not isinstance(found, Connection):
        raise TypeError(f"{found!r} is no connection, such as links.Link")
    parts = (found, *(found.factors if isinstance(found, Alternatives) else ()))
    for link in [part for part in parts if isinstance(part, Link)]:
        given = [one for one in (link.a_positions, link.b_positions) if one is not None]
        if len(given) == 1 or not all(
            isinstance(one, np.ndarray) and one.ndim == 1 and one.dtype.kind in "iu" for one in given
        ):
            raise TypeError("positions of a Link must be two arrays of integers, or None")
        if given and len(given[0]) != len(given[1]):
            raise TypeError(f"a Link pairs {len(given[0])} positions with {len(given[1])}")


_REGISTERED: dict[Any, Rule] = {}
_RULES: dict[object, Rule] = {
    aten.linear: products.linear,
    aten.matmul: products.matrix_product,
    aten.mm: products.matrix_product,
    aten.bmm: products.matrix_product,
    aten.addmm: products.with_addend,
    aten.baddbmm: products.with_addend,
    aten.einsum: products.einsum,
    aten.tensordot: products.tensordot,
    aten.scaled_dot_product_attention: products.attention,
    aten.embedding: products.embedding,
    aten.transpose: shapes.moved,
    aten.swapaxes: shapes.moved,
    aten.permute: shapes.moved,
    aten.t: shapes.moved,
    aten.numpy_T: shapes.moved,
    aten.mT: shapes.moved,
    aten.movedim: shapes.moved,
    aten.expand: shapes.expanded,
    aten.expand_as: shapes.expanded_as,
    aten.slice: shapes.sliced,
    aten.select: shapes.selected,
    operator.getitem: shapes.item,
    aten.cat: shapes.joined,
    aten.stack: shapes.stacked,
    aten.view_as_complex: shapes.paired,
    aten.view_as_real: shapes.paired,
    aten.glu: shapes.gated_half,
    aten.index: shapes.indexed,
    aten.index_select: shapes.index_selected,
    aten.flip: places.flipped,
    aten.roll: places.rolled,
    aten.pad: places.padded,
    aten.constant_pad_nd: places.padded,
    aten.type_as: reductions.first_only,
    aten.conv1d: products.convolution,
    aten.convolution: products.convolution,
    aten.index_add: shapes.scattered,
    aten.index_put: shapes.placed,
    aten.slice_scatter: shapes.slice_scattered,
    aten.repeat: shapes.repeated,
    aten.tile: shapes.repeated,
    aten.repeat_interleave: shapes.interleaved,
    **dict.fromkeys(ops.VIEWS, shapes.reshaped),
    **dict.fromkeys(ops.REDUCTIONS, reductions.reduction),
    **dict.fromkeys(ops.ORDERED, reductions.ordered),
    **dict.fromkeys(ops.NORMS - ops.packets("group_norm"), reductions.norm),
    **dict.fromkeys(ops.METADATA_ONLY, reductions.metadata_only),
    **dict.fromkeys(ops.FACTORIES, reductions.factory),
}
