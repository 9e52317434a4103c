"""Pad grouped products whose widths their kernel does not take.

    y = _grouped_mm(x, w, ends)     →     x⁺, w⁺ = x, w with zeros after the last feature
                                          y = slice(_grouped_mm(x⁺, w⁺, ends), 1, 0, width)

Rules:
1. The kernel reads rows that start at multiples of 16 bytes, so both widths of a stack of matrices must be
   multiples of 16 bytes; zeros up to there add nothing to a sum.
2. Products whose widths the kernel takes are left alone, and so are those of another kernel.
3. The parameters keep the shapes that the plan gives them.  The padded stack is a copy made at each run, so
   widths that `--align` has made multiples of eight are faster.
"""

from dataclasses import dataclass

from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import aten
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program

_ROW_BYTES = 16


@dataclass(frozen=True)
class AlignGroups:
    """Pad the operands of grouped products to the widths that their kernel takes."""

    name = "align-groups"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        odd = [node for node in program.graph.nodes if _is_odd(node)]
        for node in odd:
            _pad(program.graph, node)
        if odd:
            program.rebuild(dict(program.tensors()))
        return PassResult(bool(odd), f"{len(odd)} grouped products padded")


def _is_odd(node: fx.Node) -> bool:
    if node.target is not aten._grouped_mm.default:
        return False
    return any(_missing(node, size) for size in ops.shape_of(node.args[1])[1:])  # type: ignore[arg-type]


def _missing(node: fx.Node, size: int) -> int:
    """Return the number of elements that pad `size` to a multiple of `_ROW_BYTES`."""
    return -size % (_ROW_BYTES // node.meta["val"].dtype.itemsize)


def _pad(graph: fx.Graph, node: fx.Node) -> None:
    rows, stack = node.args[0], node.args[1]
    assert isinstance(rows, fx.Node) and isinstance(stack, fx.Node)
    _, summed, width = ops.shape_of(stack)
    more, wider = _missing(node, summed), _missing(node, width)
    with graph.inserting_before(node):
        node.update_arg(0, _padded(graph, rows, [0, more]))
        node.update_arg(1, _padded(graph, stack, [0, wider, 0, more]))
    result = node.meta["val"]
    node.meta["val"] = result.new_empty((result.shape[0], width + wider))
    if wider:
        with graph.inserting_after(node):
            narrow = graph.call_function(aten.slice.Tensor, (node, 1, 0, width))
        narrow.meta["val"] = result
        node.replace_all_uses_with(narrow, delete_user_cb=lambda user: user is not narrow)


def _padded(graph: fx.Graph, value: fx.Node, sizes: list[int]) -> fx.Node:
    """Return `value` padded with zeros at the end of its last dimensions, in the order of `pad`."""
    if not any(sizes):
        return value
    padded = graph.call_function(aten.constant_pad_nd.default, (value, sizes))
    shape = list(value.meta["val"].shape)
    for back, added in enumerate(sizes[1::2], start=1):
        shape[-back] += added
    padded.meta["val"] = value.meta["val"].new_empty(shape)
    return padded
