"""A graph with every operation of another one once: what a translator must know, however deep the decoder.

    layers.0: linear (16 → 24), silu, linear (24 → 16), add      →      linear (16 → 24), silu,
    layers.1: linear (16 → 24), silu, linear (24 → 16), add             linear (24 → 16), add

1. Two nodes are alike if they call one function, and their arguments and results have the same shapes and
   dtypes.  Tensors that are read are alike if their shapes and dtypes are.
2. A node that is like an earlier one is left out, and the earlier one stands in for it.  So all shapes are
   right, and the values mean nothing.
3. All values that nothing reads are outputs, so that no tracer drops them.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from dispfx.ir.lengths import held_to, hold_to
from dispfx.ir.program import own_tensor


def one_of_each(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a graph module with the inputs of another one, and each of its operations once.

    Args:
        module: of a captured program; it is not changed, and its tensors are shared.
        device: parameters without values get room there, and no values.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph, root = fx.Graph(), nn.Module()
    first: dict[Any, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            break
        kind = _kind(node)
        if kind not in first:
            first[kind] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                own_tensor(root, str(node.target), _held(tensors[str(node.target)], device))
        copies[node] = first[kind]
    graph.output(tuple(node for node in first.values() if not node.users and _is_tensor(node)))
    found = fx.GraphModule(root, graph)
    hold_to(found, held_to(module))
    return found


def _held(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _kind(node: fx.Node) -> Any:
    if node.op == "placeholder":
        return node
    value = _described(node)
    if node.op == "get_attr":
        return node.op, value
    given = map_aggregate((node.args, node.kwargs), lambda one: _described(one))  # type: ignore[arg-type]
    return node.target, repr(given), value


def _described(value: Any) -> str:
    """Return shapes and dtypes of a node's value; anything else as it is written."""
    if not isinstance(value, fx.Node):
        return repr(value)
    return repr(map_aggregate(value.meta.get("val"), _shaped))  # type: ignore[arg-type]


def _shaped(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else str(value)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
