"""Give attention values of the size of keys, which is what its fast kernels take.

    a = scaled_dot_product_attention(q, k, v)
        →   p = constant_pad_nd(v, [0, D − E])          v (B, H, T, E), k (B, H, T, D)
            a = slice(scaled_dot_product_attention(q, k, p), 3, 0, E)

Rules:
1. Values of fewer features than keys get zeros up to there, and the result loses the features that are made
   of them; every other feature is the same sum.
2. Values of the size of keys, or larger, are left alone.
Only the copy for a prefill is larger: the cache keeps the smaller values.
"""

from dataclasses import dataclass

from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import aten, operand, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program


@dataclass(frozen=True)
class PadValues:
    """Pad values that are smaller than keys."""

    name = "pad-values"
    requires = "static"
    ensures = "static"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        smaller = [
            node for node in program.graph.nodes if packet(node) in ops.ATTENTION and _missing(node) > 0
        ]
        for node in smaller:
            _pad(program.graph, node)
        if smaller:
            program.rebuild(dict(program.tensors()))
        return PassResult(bool(smaller), f"{len(smaller)} attentions got padded values")


def _missing(node: fx.Node) -> int:
    """Return how many features values have less than keys."""
    key, value = operand(node, 1), operand(node, 2)
    return ops.shape_of(key)[-1] - ops.shape_of(value)[-1]


def _pad(graph: fx.Graph, node: fx.Node) -> None:
    value, result, missing = operand(node, 2), node.meta["val"], _missing(node)
    size, last = ops.shape_of(value)[-1], ops.rank(node) - 1
    with graph.inserting_before(node):
        padded = graph.call_function(aten.constant_pad_nd.default, (value, [0, missing]))
    padded.meta["val"] = aten.constant_pad_nd.default(value.meta["val"], [0, missing])
    node.update_arg(2, padded)
    node.meta["val"] = result.new_empty((*result.shape[:-1], size + missing))
    with graph.inserting_after(node):
        narrow = graph.call_function(aten.slice.Tensor, (node, last, 0, size))
    narrow.meta["val"] = result
    node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)
