"""The same graph in another type of number.

A program in bfloat16 computes with few digits, so comparing it with another form of itself hides small
faults.  Its twin in float32 has the same weights and the same operations, and shows them.
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from dispfx.ir.program import with_tensors


def retyped(module: fx.GraphModule, old: torch.dtype, new: torch.dtype) -> fx.GraphModule:
    """Return a copy of a graph module in which every tensor and every cast of type `old` is of type `new`.

    Tensors of other types are shared with `module`, which is not changed.  A parameter at several paths
    becomes one again.
    """
    graph = copy.deepcopy(module.graph)

    def swap(value: Any) -> Any:
        return new if value is old else value

    for node in graph.nodes:
        node.args = _mapped(tuple(node.args), swap)
        node.kwargs = _mapped(dict(node.kwargs), swap)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype is old:
            node.meta["val"] = value.to(new)
    made: dict[int, Tensor] = {}
    tensors = {}
    for path, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        tensors[path] = made.setdefault(id(tensor), _converted(tensor, old, new))
    return with_tensors(graph, tensors)


def _mapped(values: Any, swap: Any) -> Any:
    """Apply `swap` to every leaf of arguments."""
    if isinstance(values, tuple | list):
        mapped = [_mapped(value, swap) for value in values]
        return tuple(mapped) if isinstance(values, tuple) else mapped
    if isinstance(values, dict):
        return {name: _mapped(value, swap) for name, value in values.items()}
    return swap(values)


def _converted(tensor: Tensor, old: torch.dtype, new: torch.dtype) -> Tensor:
    if tensor.dtype is not old:
        return tensor
    converted = tensor.detach().to(new)
    return nn.Parameter(converted, requires_grad=False) if isinstance(tensor, nn.Parameter) else converted
