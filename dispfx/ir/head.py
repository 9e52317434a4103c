"""The head of a graph: the product from the stream to the logits, and the operations after it."""

from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import aten, packet


def way_to_head(logits: fx.Node) -> list[fx.Node] | None:
    """Return the values from the logits back to the head's product, or None if it is not one per token.

    1. From the logits back to the head there may be pointwise operations with numbers only, such as a
       softcap or a scaling; each acts on every token by itself.
    2. The head is one `linear` of a value (B, T, D).
    """
    way = [logits]
    while ops.is_pointwise(way[-1]) and len(ops.operands(way[-1])) == 1:
        way.append(ops.operands(way[-1])[0])
    head = way[-1]
    is_head = packet(head) is aten.linear and isinstance(head.args[0], fx.Node) and ops.rank(head) == 3
    return way if is_head and all(len(node.users) == 1 for node in way) else None
