"""Compile the body of a part.

A gate is an operation of its own, which a compiler cannot look into; in a body that is compiled it is
spelled as the product it is, so that it fuses with what is around it:

    g = gate(x, mask, dim)     →     g = (x.float() · mask).to(x.dtype)

Projections that read one value are joined first (`sibling_products`): a compiler would read that value
several times in the backward pass.
"""

import copy
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import fx, nn

from dispfx.fast_decoder.layered import BodyCall
from dispfx.fast_decoder.sibling_products import join_siblings
from dispfx.ir import ops
from dispfx.ir.gate import gate_product
from dispfx.ir.outline import Part

BACKEND = "inductor"


def compiled_call(part: Part, *, join: bool = True) -> BodyCall:
    """Return a call of the part's body that compiles itself when it is first called.

    It is compiled once for every shape of its inputs, so once for all parts that share the body.  The part's
    tensors are frozen.

    Args:
        join: compute projections that read one value by `sibling_products`.
    """
    graph = copy.deepcopy(part.body.graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    frozen = frozenset(inputs[len(part.values) :])
    _spell_gates(graph)
    if join:
        join_siblings(graph, frozen)
    return compiled_function(fx.GraphModule(nn.Module(), graph, "Body").forward)


def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles itself once for every shape of its operands."""
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)

    @wraps(function)
    def call(*operands: Any) -> Any:
        with warnings.catch_warnings():
            # The tracer looks at `.grad` of every operand, masks and stream values among them.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # It makes an object of torch.autograd.Function for its own use.
            warnings.filterwarnings("ignore", message=".* should not be instantiated")
            return compiled(*operands)

    return call


def _spell_gates(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if not ops.is_gate(node):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(gate_product, node.args)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.lint()
