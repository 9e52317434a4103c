"""Turn scattered writes into gathers, which are deterministic and fuse into what follows.

    h = index_add(x, 2, index, linear(a, v))    →    p = linear(a, v⁺)     v⁺ = v and zero rows
                                                     h = add(x, index_select(p, 2, inverse))

Rules:
1. `inverse[i]` is the place of feature i among the kept ones, or the first zero row where it is pruned.
2. Zero rows are added to the weight and bias of a `linear` that nothing else uses, up to a multiple of
   `row_multiple`; any other operand is padded by one column.
3. An `index_add` into zeros becomes the gather alone.
Each feature is still one sum over the same numbers; a widened projection may run in another kernel, so
values agree up to the rounding of that kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from dispfx.ir import ops
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import INDEX_PREFIX, Program

INVERSE_PREFIX = "dispfx_inverse"


@dataclass(frozen=True)
class GatherAdd:
    """Replace the `index_add` of every write by a gather.

    Args:
        row_multiple: a widened projection has a multiple of this many rows.
    """

    row_multiple: int = 8

    name = "gather-add"
    requires = "lowered"
    ensures = "lowered"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place; projections that are widened get new tensors."""
        tensors = dict(program.tensors())
        writes = [node for node in program.graph.nodes if _is_write(node)]
        for node in writes:
            self._rewrite(program, node, tensors)
        if writes:
            program.rebuild(tensors)
        return PassResult(bool(writes), f"{len(writes)} writes")

    def _rewrite(self, program: Program, node: fx.Node, tensors: dict[str, Tensor]) -> None:
        base, dim, index, small = node.args[:4]
        assert isinstance(base, fx.Node) and isinstance(small, fx.Node) and isinstance(index, fx.Node)
        assert isinstance(dim, int)
        graph = program.graph
        width = ops.shape_of(node)[dim]
        kept = tensors[str(index.target)]
        padded = self._padded(graph, small, dim, tensors)
        inverse = _inverse(graph, str(index.target), kept, width, tensors)
        with graph.inserting_before(node):
            full = graph.call_function(aten.index_select.default, (padded, dim, inverse))
        full.meta["val"] = node.meta["val"]
        if packet(base) is aten.new_zeros:
            node.replace_all_uses_with(full)
            graph.erase_node(node)
            return
        # Rewritten in place, so that the stream's facts still name it.
        node.target = aten.add.Tensor
        node.args, node.kwargs = (base, full), {}

    def _padded(self, graph: fx.Graph, small: fx.Node, dim: int, tensors: dict[str, Tensor]) -> fx.Node:
        """Return `small` with at least one column of zeros after its last."""
        if _is_own_projection(small, dim):
            rows = ops.shape_of(small)[dim]
            added = self.row_multiple - rows % self.row_multiple
            for operand in small.args[1:]:
                if isinstance(operand, fx.Node):
                    _append_zero_rows(operand, added, tensors)
            value = small.meta["val"]
            small.meta["val"] = value.new_empty((*value.shape[:-1], rows + added))
            return small
        back = ops.rank(small) - 1 - dim
        with graph.inserting_after(small):
            padded = graph.call_function(aten.constant_pad_nd.default, (small, [0, 0] * back + [0, 1]))
        value = small.meta["val"]
        sizes = [size + 1 if place == dim else size for place, size in enumerate(value.shape)]
        padded.meta["val"] = value.new_empty(sizes)
        return padded


def _is_write(node: fx.Node) -> bool:
    """Whether the node scatters a site's kept features; a decoder may have an `index_add` of its own."""
    if packet(node) is not aten.index_add:
        return False
    index = node.args[2]
    return isinstance(index, fx.Node) and str(index.target).startswith(f"{INDEX_PREFIX}.")


def _is_own_projection(small: fx.Node, dim: int) -> bool:
    """Whether rows can be added to the projection without anything else noticing."""
    users = [user for user in small.users if packet(user) not in ops.METADATA_ONLY]
    if packet(small) is not aten.linear or len(users) != 1 or dim != ops.rank(small) - 1:
        return False
    weights = [value for value in small.args[1:] if isinstance(value, fx.Node)]
    return all(value.op == "get_attr" and len(value.users) == 1 for value in weights)


def _append_zero_rows(weight: fx.Node, added: int, tensors: dict[str, Tensor]) -> None:
    tensor = tensors[str(weight.target)].detach()
    zeros = tensor.new_zeros((added, *tensor.shape[1:]))
    tensors[str(weight.target)] = nn.Parameter(torch.cat([tensor, zeros]), requires_grad=False)
    weight.meta["val"] = weight.meta["val"].new_empty((tensor.shape[0] + added, *tensor.shape[1:]))


def _inverse(graph: fx.Graph, path: str, kept: Tensor, width: int, tensors: dict[str, Tensor]) -> fx.Node:
    """Return the node with the position of every feature's value, or of the first zero."""
    target = INVERSE_PREFIX + path.removeprefix(INDEX_PREFIX)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == target:
            return node
    inverse = torch.full((width,), len(kept), dtype=torch.int32, device=kept.device)
    inverse[kept.long()] = torch.arange(len(kept), dtype=torch.int32, device=kept.device)
    tensors[target] = inverse
    with graph.inserting_after(next(iter(graph.nodes))):
        node = graph.create_node("get_attr", target, name=target.replace(".", "_"))
    node.meta["val"] = torch.empty(width, dtype=torch.int32, device="meta")
    return node
