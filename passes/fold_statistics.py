"""Keep the statistics of the dense decoder's weights.

    s = mean(abs(weight))                          s = dispfx_dense.weight.0      computed once
    y = linear(x, round(weight / s) * s)      →    y = linear(x, round(weight / s) * s)

A scale, mean or norm over a whole weight would change for the kept elements if others are cut.  Here it
becomes a constant, so a cut weight keeps its values.

Rules:
1. Only a reduction over parameters is folded, not one over activations.  Any operation that turns a weight
   into one number, such as a product of two vectors, is a reduction.
2. A parameter that nothing else reads is left alone: its reduction is the weight itself, not its scale.
3. Constants are buffers named after the parameter, so every capture of the decoder gives them the same names.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from dispfx.analysis.flow import Flow
from dispfx.ir import ops
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import DENSE_PREFIX, Program

_REDUCTIONS = ops.REDUCTIONS | ops.packets("quantile nanquantile median nanmedian kthvalue aminmax topk")
_MOVES = ops.SHAPE_OPS | ops.GATHERS


@dataclass(frozen=True)
class FoldStatistics:
    """Turn reductions over weights into constants."""

    name = "fold-statistics"
    requires = "canonical"
    ensures = "canonical"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        tensors = dict(program.tensors())
        sources = _sources(program.graph, Flow.of(program.graph), tensors)
        reduced = {node for node in sources if _is_statistic(node) and sources[node]}
        read = _read_otherwise(reduced, sources)
        folded = [node for node in sources if node in reduced and sources[node] <= read]
        constants = {node: _computed(node, tensors) for node in folded}
        for node, constant in constants.items():
            _replace(program.graph, node, min(sources[node]), constant, tensors)
        if folded:
            program.rebuild(tensors)
        return PassResult(bool(folded), f"{len(folded)} statistics of weights")


def _sources(graph: fx.Graph, flow: Flow, tensors: Mapping[str, Tensor]) -> dict[fx.Node, frozenset[str]]:
    """Return every value that is computed from tensors alone, and from which parameters."""
    sources: dict[fx.Node, frozenset[str]] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            path = str(node.target)
            sources[node] = frozenset([path] if isinstance(tensors[path], nn.Parameter) else [])
        elif node.op == "call_function" and inputs and all(value in sources for value in inputs):
            sources[node] = frozenset().union(*(sources[value] for value in inputs))
    return sources


def _is_statistic(node: fx.Node) -> bool:
    """Whether a tensor is what a reduction gives, or one of several that it gives."""
    many = node.args[0] if node.target is operator.getitem else node
    if not ops.is_tensor(node) or not isinstance(many, fx.Node):
        return False
    moves = ops.is_pointwise(many) or ops.packet(many) in _MOVES
    return ops.packet(many) in _REDUCTIONS or (node.meta["val"].numel() == 1 and not moves)


def _read_otherwise(reduced: set[fx.Node], sources: Mapping[fx.Node, frozenset[str]]) -> set[str]:
    """Return the parameters that reach the rest of the graph on a way without a reduction (rule 2)."""
    pending = [node for node in sources if any(user not in sources for user in node.users)]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen and node not in reduced:
            seen.add(node)
            pending += node.all_input_nodes
    return {str(node.target) for node in seen if node.op == "get_attr"}


def _computed(node: fx.Node, tensors: Mapping[str, Tensor]) -> Any:
    """Compute a value from the tensors; nothing on the way is kept."""
    if node.op == "get_attr":
        return tensors[str(node.target)].detach()
    args, kwargs = (
        map_arg(part, lambda value: _computed(value, tensors)) for part in (node.args, node.kwargs)
    )
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _replace(
    graph: fx.Graph, node: fx.Node, parameter: str, constant: Tensor, tensors: dict[str, Tensor]
) -> None:
    number = sum(path.startswith(f"{DENSE_PREFIX}.{parameter}.") for path in tensors)
    path = f"{DENSE_PREFIX}.{parameter}.{number}"
    tensors[path] = constant.clone()
    with graph.inserting_before(node):
        dense = graph.create_node("get_attr", path)
    dense.meta.update(node.meta)
    node.replace_all_uses_with(dense)
