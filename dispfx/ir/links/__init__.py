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

import operator
from collections.abc import Callable

from torch import fx

from dispfx.ir import ops
from dispfx.ir.links import products, reductions, shapes
from dispfx.ir.links.connections import Alternatives, Connection, Contraction, Dimension, Link, Mixing
from dispfx.ir.links.shapes import slice_positions
from dispfx.ir.ops import aten, packet

__all__ = [
    "Alternatives", "Connection", "Contraction", "Dimension", "Link", "Mixing", "links", "slice_positions",
]  # fmt: skip


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
        return reductions.pointwise(node)
    return None


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
    aten.expand: shapes.expanded,
    aten.slice: shapes.sliced,
    aten.select: shapes.selected,
    operator.getitem: shapes.item,
    aten.cat: shapes.joined,
    aten.glu: shapes.gated_half,
    aten.index: shapes.indexed,
    aten.index_select: shapes.index_selected,
    aten.type_as: reductions.first_only,
    **dict.fromkeys(ops.VIEWS, shapes.reshaped),
    **dict.fromkeys(ops.REDUCTIONS, reductions.reduction),
    **dict.fromkeys(ops.ORDERED, reductions.ordered),
    **dict.fromkeys(ops.NORMS, reductions.norm),
    **dict.fromkeys(ops.METADATA_ONLY, reductions.metadata_only),
}
