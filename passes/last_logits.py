"""Compute only the logits of the last token, because generation needs no others of a prompt.

    logits = linear(x, head): (B, T, V)    →    s = slice(x, 1, -1, end): (B, 1, D)
                                                logits = linear(s, head): (B, 1, V)

Rules:
1. The head is one product per token, followed only by pointwise operations with numbers, such as a softcap
   (`dispfx.ir.head`).  Anything else is left alone.
2. A head that already reads one token is left alone.
"""

from dataclasses import dataclass

from torch import fx

from dispfx.ir import ops
from dispfx.ir.head import way_to_head
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program

_END = 2**63 - 1


@dataclass(frozen=True)
class LastLogits:
    """Read the last token in the head."""

    name = "last-logits"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        way = way_to_head(ops.logits_of(program.graph))
        if way is None:
            return PassResult(False, "the head is not a projection of each token")
        value = ops.operand(way[-1], 0)
        if _is_last(value):
            return PassResult(False, "the head reads the last token already")
        with program.graph.inserting_before(way[-1]):
            last = program.graph.call_function(aten.slice.Tensor, (value, 1, -1, _END))
        last.meta["val"] = value.meta["val"][:, -1:]
        way[-1].update_arg(0, last)
        for node in way:
            node.meta["val"] = node.meta["val"][:, -1:]
        program.rebuild(dict(program.tensors()))
        return PassResult(True)


def _is_last(value: fx.Node) -> bool:
    return packet(value) is aten.slice and value.args[1:3] == (1, -1)
