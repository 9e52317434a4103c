"""What autograd keeps of operations for the backward pass, when the weights are frozen.

The rule of each operation is that of its derivative (`derivatives.yaml` of torch):

1. A product keeps an operand if another operand needs a gradient.  A weight needs none, so the
   activation that meets it is not kept: this is what learning masks saves against learning weights.
   The grouped product that transformers brings keeps its operands whatever needs a gradient.
2. A gate keeps its operand, whose product with the gradient is the gradient of its mask.
3. Pointwise operations keep their operand (silu, gelu, pow, …) or their result (exp, tanh, rsqrt, …).
4. Sums, casts and changes of shape keep nothing.
5. Attention keeps query, key, value, mask, result and one float32 a row, and a boolean mask once more in
   the type of the query, as its kernels take it.  Where query and value differ in width, torch has no
   fused kernel, and the scores are kept instead.
6. A norm keeps its operand and two float32 a row.
7. Any other operation is taken to keep operands and result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from dispfx.estimate.graph_sizes import Sizes, storage
from dispfx.ir import ops
from dispfx.ir.ops import packet, packets

_NOTHING = (
    ops.CASTS
    | ops.COPIES
    | ops.SHAPE_OPS
    | ops.AVERAGES
    | ops.GATHERS
    | packets("add sub neg roll flip embedding masked_fill where pad constant_pad_nd cumsum one_hot new_ones")
    | packets("index_add index_put scatter_add gather lift_fresh")
)
_OPERANDS = packets(
    "silu gelu pow square softplus sin cos log log2 log1p abs clamp clamp_min clamp_max mish hardswish "
    "hardsigmoid hardtanh leaky_relu elu celu log_sigmoid logsigmoid sinc atan"
)
_RESULT = packets("relu relu6 tanh sigmoid exp expm1 sqrt rsqrt reciprocal softmax _softmax log_softmax")
_PRODUCTS = ops.PRODUCTS | packets("mul multiply div true_divide addcmul")
# Torch's own; its derivative asks what needs a gradient.
GROUPED = packets("_grouped_mm")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Kept:
    """What one operation keeps: values of the graph, and bytes that are no value of it."""

    values: tuple[fx.Node, ...] = ()
    further_bytes: int = 0


class KeptMemory:
    """Which memory autograd holds of nodes, and whose turn in the backward pass releases it.

    Args:
        nodes: in the order in which they run.
        needs: values that need a gradient.
        sizes: of the graph at the batch and length of a step.
    """

    def __init__(self, nodes: Sequence[fx.Node], needs: frozenset[fx.Node], sizes: Sizes):
        self.bytes_of: dict[object, int] = {}
        self.released_by: dict[fx.Node, list[object]] = {}
        first: dict[object, fx.Node] = {}
        weights = {storage(node) for node in nodes if node.op == "get_attr"}
        owner: dict[object, fx.Node] = {}
        for node in nodes:
            owner.setdefault(storage(node), node)
            if node not in needs or node.op != "call_function":
                continue
            if needs.isdisjoint(ops.operands(node)):  # a leaf is held where its gradient is added up
                self.bytes_of[storage(node)] = sizes.bytes(node)
                continue
            held = kept_by(node, needs, sizes)
            for key in {storage(value) for value in held.values}.intersection(owner) - weights:
                self.bytes_of.setdefault(key, sizes.bytes(owner[key]))
                first.setdefault(key, node)
            if held.further_bytes:
                self.bytes_of[node, "further"] = held.further_bytes
                first[node, "further"] = node
        for key, node in first.items():
            self.released_by.setdefault(node, []).append(key)

    @property
    def total(self) -> int:
        """Bytes held after the forward pass."""
        return sum(self.bytes_of.values())


def kept_by(node: fx.Node, needs: frozenset[fx.Node], sizes: Sizes) -> Kept:
    """Return what autograd keeps for the backward pass of a node whose result needs a gradient.

    Args:
        needs: values that need a gradient.
        sizes: of the graph at the batch and length of a step.
    """
    operation = packet(node)
    operands = [value for value in ops.operands(node) if ops.is_tensor(value)]
    if ops.is_gate(node):
        return Kept(tuple(operands[:1]))
    if operation in _NOTHING or not ops.is_tensor(node):
        return Kept()
    if operation in ops.ATTENTION:
        return _attention(node, operands, sizes)
    if operation in ops.NORMS:
        rows = sizes.count(node) // max(sizes.shape(node)[-1], 1)
        return Kept(tuple(operands[:1]), 2 * rows * _FLOAT_BYTES)
    if ops.is_grouped(node) and operation not in GROUPED:
        return Kept(tuple(operands))
    if operation in _PRODUCTS | GROUPED:
        return Kept(tuple(value for value in operands if needs.intersection(_others(node, value))))
    if operation in _OPERANDS:
        return Kept(tuple(operands[:1]))
    return Kept((node,)) if operation in _RESULT else Kept((*operands, node))


def _others(node: fx.Node, value: fx.Node) -> list[fx.Node]:
    """Return the operands that a product multiplies `value` with; itself among them in `x · x`."""
    twice = [value] if node.args.count(value) > 1 else []
    return twice + [other for other in ops.operands(node) if other is not value]


def _attention(node: fx.Node, operands: list[fx.Node], sizes: Sizes) -> Kept:
    query, key, value, *masks = operands
    width = query.meta["val"].element_size()
    rows = math.prod(sizes.shape(node)[:-1])
    # Kernels take a mask that is added, so each attention makes one of its own from a boolean mask.
    own_masks = sum(sizes.count(mask) * width for mask in masks if ops.is_boolean(mask))
    if sizes.shape(query)[-1] == sizes.shape(value)[-1]:
        shared = [mask for mask in masks if not ops.is_boolean(mask)]
        return Kept((query, key, value, *shared, node), rows * _FLOAT_BYTES + own_masks)
    return Kept((query, key, value), rows * sizes.shape(key)[-2] * width)
