"""The head of a graph: the product that makes logits of the stream, and what follows it."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import aten, packet


def way_to_head(logits: fx.Node) -> list[fx.Node] | None:
    """Return the values from the logits back to the head's product, or None if it acts on several tokens.

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


def split_at_head(
    module: fx.GraphModule, *, also: Sequence[fx.Node] = ()
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """Return ids → what the head reads (B, T, D), and that → logits; None where there is no such head.

    Both share the tensors of `module`, which is not changed.

    Args:
        also: values that the first one returns too: then it returns a tuple, and these after the first value.
    """
    logits = ops.logits_of(module.graph)
    way = way_to_head(logits) if "val" in logits.meta else None
    if way is None:
        return None
    before, after = fx.Graph(), fx.Graph()
    values: dict[fx.Node, Any] = {}
    stream = ops.operand(way[-1], 0)
    before.graph_copy(module.graph, values)
    before.output((values[stream], *map(values.__getitem__, also)) if also else values[stream])
    before.eliminate_dead_code()
    made = {stream: after.placeholder("x_BRD")}
    for node in reversed(way):
        for read in node.all_input_nodes:
            if read not in made:
                made[read] = after.node_copy(read, made.__getitem__)
        made[node] = after.node_copy(node, made.__getitem__)
    after.output(made[logits])
    return fx.GraphModule(module, before), fx.GraphModule(module, after)
