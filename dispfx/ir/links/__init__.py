"""Which positions of an operation's operands and result are the same feature.

Entry point: `links(node)`.  One rule an operation says how it connects dimensions; `dispfx.ir.closure`
walks these connections and knows no operation itself.

Kinds of connection:
    Link         position `a_positions[i]` of one dimension is position `b_positions[i]` of another
    Contraction  a product sums over both dimensions together
    Mixing       the operation combines all positions of a dimension (a softmax, a norm, a mean)
    Free         all positions of a dimension are alike, and the graph spells out how many there are

A dimension that a rule leaves out is Mixing: what is not known to be safe refuses the site.  Dimensions
of size one are broadcast and need no connection.  An operation without a rule gives None: it is opaque.
"""

import operator
from collections.abc import Callable

from torch import fx

from dispfx.ir import ops
from dispfx.ir.links import places, products, reductions, shapes
from dispfx.ir.links.connections import (
    Alternatives,
    Connection,
    Contraction,
    Dimension,
    Free,
    Link,
    Mixing,
    ends,
)
from dispfx.ir.links.shapes import slice_positions
from dispfx.ir.ops import aten, packet

__all__ = [
    "Alternatives", "Connection", "Contraction", "Dimension", "Free", "Link", "Mixing", "links",
    "slice_positions",
]  # fmt: skip


def links(node: fx.Node) -> list[Connection] | None:
    """Return how `node` connects the dimensions of its operands and its result.

    None means that no rule is known.  Values that are not tensors connect nothing.
    """
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    rule = products.grouped if ops.is_grouped(node) else _RULES.get(packet(node))
    if rule is None and ops.is_pointwise(node):
        rule = reductions.pointwise
    found = rule(node) if rule is not None else None
    return found if found is None else [*found, *_left_out(node, found)]


def _left_out(node: fx.Node, found: list[Connection]) -> list[Connection]:
    """Return a Mixing for every dimension that a rule says nothing of.

    Operands that only lend a dtype or a shape do not count: whatever is cut of them changes nothing here.
    """
    known = {dimension for connection in found for dimension in ends(connection)}
    values = [value for value in (node, *ops.operands(node)) if ops.is_tensor(value)]
    return [
        Mixing((value, dim))
        for value in values
        for dim, size in enumerate(ops.shape_of(value))
        if size != 1 and (value, dim) not in known
    ]


_RULES: dict[object, Callable[[fx.Node], list[Connection] | None]] = {
    aten.linear: products.linear,
    aten.matmul: products.matrix_product,
    aten.mm: products.matrix_product,
    aten.bmm: products.matrix_product,
    aten.addmm: products.with_addend,
    aten.baddbmm: products.with_addend,
    aten.einsum: products.einsum,
    aten.scaled_dot_product_attention: products.attention,
    aten.embedding: products.embedding,
    aten.transpose: shapes.moved,
    aten.swapaxes: shapes.moved,
    aten.permute: shapes.moved,
    aten.t: shapes.moved,
    aten.numpy_T: shapes.moved,
    aten.movedim: shapes.moved,
    aten.expand: shapes.expanded,
    aten.expand_as: shapes.expanded_as,
    aten.slice: shapes.sliced,
    aten.select: shapes.selected,
    operator.getitem: shapes.item,
    aten.cat: shapes.joined,
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
