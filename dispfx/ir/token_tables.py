"""How many token ids a decoder reads, which its logits do not tell: a head may be wider or narrower.

A table is looked up by token ids where they index its rows as they are, through views and casts at most.  Ids
that are computed with before, as a hash or a clamp is, say nothing about their range.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from dispfx.ir import ops

_SAME_IDS = ops.CASTS | ops.COPIES | ops.SHAPE_OPS - ops.packets("cat stack")


def tokens_read(graph: fx.Graph) -> int | None:
    """Return the rows of the smallest table that is looked up by token ids, or None without one."""
    ids = {next(node for node in graph.nodes if node.op == "placeholder")}
    rows = []
    for node in graph.nodes:
        if node.op != "call_function" or not ids.intersection(node.all_input_nodes):
            continue
        if ops.packet(node) in _SAME_IDS and node.args[0] in ids:
            ids.add(node)
        rows += _rows(node, ids)
    return min(rows, default=None)


def _rows(node: fx.Node, ids: set[fx.Node]) -> Iterator[int]:
    """Yield the sizes of the dimensions that token ids index."""
    table = node.args[0] if node.args else None
    if not isinstance(table, fx.Node) or table in ids:
        return
    indexed: list[int] = []
    if ops.packet(node) is ops.aten.embedding and node.args[1] in ids:
        indexed = [0]
    elif ops.packet(node) is ops.aten.index_select and ops.argument(node, 2, "index") in ids:
        indexed = [int(node.args[1])]  # type: ignore[arg-type]
    elif ops.packet(node) is ops.aten.index and isinstance(node.args[1], Sequence):
        indexed = [dim for dim, index in enumerate(node.args[1]) if index in ids]
    held = ops.held(table)  # a graph that was read from a file has no notes on its values
    for dim in indexed:
        if held is not None:
            yield held.shape[dim]
        elif "val" in table.meta and not ops.is_dynamic(table, dim):
            yield ops.shape_of(table)[dim]
