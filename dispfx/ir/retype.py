"""The same graph in another type of number, or on another device.

A program in bfloat16 computes with few digits, so comparing it with another form of itself hides small
faults.  Its twin in float32 has the same weights and the same operations, and shows them.

The same on another device than its parameters.  A captured graph names the device of every tensor that it
makes itself.  Where a decoder is too large for the device that computes, its parameters stay where they are,
whoever runs the graph brings them, and all else is moved:

    arange(T, device=cpu)     →     arange(T, device=cuda:1)
"""

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from dispfx.ir.program import Program, with_tensors


def retyped(module: fx.GraphModule, old: torch.dtype, new: torch.dtype) -> fx.GraphModule:
    """Return a copy of a graph module in which every tensor and every cast of type `old` is of type `new`.

    Tensors of other types are shared with `module`, which is not changed.  A parameter at several paths
    becomes one again.
    """
    graph = copy.deepcopy(module.graph)

    def swap(value: Any) -> Any:
        return new if value is old else value

    for node in graph.nodes:
        node.args = mapped(tuple(node.args), swap)
        node.kwargs = mapped(dict(node.kwargs), swap)
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


def mapped(values: Any, swap: Any) -> Any:
    """Return arguments of an operation with `swap` applied to every leaf."""
    if isinstance(values, tuple | list):
        found = [mapped(value, swap) for value in values]
        return tuple(found) if isinstance(values, tuple) else found
    if isinstance(values, dict):
        return {name: mapped(value, swap) for name, value in values.items()}
    return swap(values)


def _converted(tensor: Tensor, old: torch.dtype, new: torch.dtype) -> Tensor:
    if tensor.dtype is not old:
        return tensor
    converted = tensor.detach().to(new)
    return nn.Parameter(converted, requires_grad=False) if isinstance(tensor, nn.Parameter) else converted


def placed(program: Program, device: torch.device) -> Program:
    """Return a copy of a program that computes on `device`; its parameters are shared and stay.

    Buffers are copied to the device.  `Program.device` of the copy is the new one.
    """
    old = program.device.type
    twin = program.clone()

    def swap(value: Any) -> Any:
        return device if isinstance(value, torch.device) and value.type == old else value

    for node in twin.graph.nodes:
        node.args = mapped(tuple(node.args), swap)
        node.kwargs = mapped(dict(node.kwargs), swap)
    tensors = {
        path: tensor if isinstance(tensor, nn.Parameter) or tensor.is_meta else tensor.to(device)
        for path, tensor in program.tensors()
    }
    twin.graph_module = with_tensors(twin.graph, tensors)
    twin.hold_to(twin.lengths)
    twin.computes_on = device
    return twin
