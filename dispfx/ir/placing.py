"""The same graph on another device than its parameters.

A captured graph names the device of every tensor that it makes itself.  Where a decoder is too large for
the device that computes, its parameters stay where they are, whoever runs the graph brings them, and all
else is moved:

    arange(T, device=cpu)     →     arange(T, device=cuda:1)
"""

from typing import Any

import torch
from torch import nn

from dispfx.ir.program import Program, with_tensors
from dispfx.ir.retype import mapped


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
