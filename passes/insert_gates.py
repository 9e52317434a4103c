"""Insert the gate of every site, with its mask as an input of the graph.

    y = linear(x, w)     →     g = gate(x, mask_0, 2)
                               y = linear(g, w)

Rules:
1. Site i gets the input `mask_i`, shape (size,), in the order of `program.sites`, after the existing inputs.
2. At each gate point the named users take the gated value; every other user keeps the plain one.  If another
   site gates the same value for a user, as heads and values do, it takes the product of both.
3. If positions do not follow features one to one, the mask is first gathered by their labels;
   positions that follow none are multiplied by one.
4. Where experts have features of their own, the gate also takes the expert of each position of dimension 0,
   counted from the ends of the experts' runs where the graph has no such numbers:

       g = gate(h, mask_0, 1, ids)          ids = searchsorted(ends, arange(positions), right=True)

5. A mean or a norm that takes its statistics over the kept features is gated and corrected as
   `dispfx.ir.kept_statistics` says.
With masks of ones the output is bit-identical.
"""

from dataclasses import dataclass

import torch
from torch import fx

from dispfx.ir import ops
from dispfx.ir.gate import GATE
from dispfx.ir.kept_statistics import gate_statistics
from dispfx.ir.ops import aten
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program
from dispfx.ir.sites import UNTOUCHED, GatePoint, Rows


@dataclass(frozen=True)
class InsertGates:
    """Insert gates at every site."""

    name = "insert-gates"
    requires = "canonical"
    ensures = "gated"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        tensors = dict(program.tensors())
        nodes = program.nodes
        last = [node for node in program.graph.nodes if node.op == "placeholder"][-1]
        for index, site in enumerate(program.sites):
            with program.graph.inserting_after(last):
                last = program.graph.placeholder(f"mask_{index}")
            last.meta["val"] = torch.empty(site.size, device="meta")
            for at, point in enumerate(site.gates):
                _insert(program.graph, nodes, point, site.experts, last, f"gate_{index}_{at}", tensors)
        program.rebuild(tensors)
        return PassResult(True, f"{sum(len(site.gates) for site in program.sites)} gates")


def _insert(
    graph: fx.Graph,
    nodes: dict[str, fx.Node],
    point: GatePoint,
    experts: int,
    mask: fx.Node,
    name: str,
    tensors: dict[str, torch.Tensor],
) -> None:
    value = nodes[point.value]
    if point.statistics:
        gate_statistics(graph, value, nodes[point.users[0]], mask, point.dim, name)
        return
    given = _given(value, nodes[point.users[0]])
    with graph.inserting_after(given):
        gate = graph.create_node("call_function", GATE, (given, mask, point.dim), name=name)
    gate.meta["val"] = value.meta["val"]
    for user in point.users:
        nodes[user].replace_input_with(given, gate)
    with graph.inserting_before(gate):
        if point.labels is not None:
            labels = point.labels
            if point.rows is not None:
                labels = _of_all(labels, experts, mask.meta["val"].shape[0] // experts)
            gate.update_arg(1, _by_label(graph, labels, mask, name, tensors))
        if point.rows is not None:
            gate.args = (*gate.args, _experts(graph, nodes, point.rows, value))


def _given(value: fx.Node, user: fx.Node) -> fx.Node:
    """Return what a user takes of a value: the value, or its product with another site's mask (rule 2)."""
    given = value
    while given not in user.all_input_nodes:
        given = next(node for node in given.users if ops.is_gate(node) and node.args[0] is given)
    return given


def _of_all(labels: tuple[int, ...], experts: int, each: int) -> tuple[int, ...]:
    """Return the labels of the features of all experts side by side."""
    starts = range(0, experts * each, each)
    return tuple(UNTOUCHED if label == UNTOUCHED else start + label for start in starts for label in labels)


def _experts(graph: fx.Graph, nodes: dict[str, fx.Node], rows: Rows, value: fx.Node) -> fx.Node:
    """Return the expert of each position of the value's dimension 0."""
    if rows.kind == "ids":
        assert rows.value is not None
        return nodes[rows.value]
    full = value.meta["val"]
    ends = None if rows.value is None else nodes[rows.value]
    size: fx.Node | int = full.shape[0]
    if not isinstance(size, int):
        size = graph.call_function(aten.sym_size.int, (value, 0))
        size.meta["val"] = full.shape[0]
    dtype = torch.int64 if ends is None else ends.meta["val"].dtype
    kwargs = {"dtype": dtype, "device": full.device}
    positions = graph.call_function(aten.arange.default, (size,), kwargs)
    positions.meta["val"] = full.new_empty(full.shape[:1], dtype=dtype)
    if ends is None:
        return positions
    found = graph.call_function(aten.searchsorted.Tensor, (ends, positions), {"right": True})
    found.meta["val"] = full.new_empty(full.shape[:1], dtype=torch.int64)
    return found


def _by_label(
    graph: fx.Graph,
    labels: tuple[int, ...],
    mask: fx.Node,
    name: str,
    tensors: dict[str, torch.Tensor],
) -> fx.Node:
    """Return mask[labels], with ones where a position follows no feature."""
    path = f"dispfx_labels.{name}"
    size = mask.meta["val"].shape[0]
    device = next(iter(tensors.values())).device
    tensors[path] = torch.tensor([size if label == UNTOUCHED else label for label in labels], device=device)
    index = graph.create_node("get_attr", path, name=path.replace(".", "_"))
    padded = graph.call_function(aten.constant_pad_nd.default, (mask, [0, 1], 1.0))
    spread = graph.call_function(aten.index_select.default, (padded, -1, index))
    for node, length in ((index, len(labels)), (padded, size + 1), (spread, len(labels))):
        node.meta["val"] = torch.empty(length, device="meta")
    return spread
