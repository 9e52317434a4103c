"""Products of one value with several frozen weights, whose gradient is summed where it is written.

    y_i = x · W_iᵀ + b_i                    forward: each product for itself
    ∂/∂x = Σ ∂/∂y_i · W_i                   backward: the first product is written, later ones add to it

Left to autograd, each product of the backward pass is written for itself, and whatever reads the sum reads
all of them: three values as large as the stream where the projections of attention begin, two in a gated MLP.

Legend: B batch, T tokens, D inputs, O outputs of a projection, R rows (B T).
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from dispfx.ir.ops import argument, aten, packet, rank


@torch.library.custom_op("dispfx::sum_of_products", mutates_args=())
def sum_of_products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return Σ left_i · right_i for (R, O_i) and (O_i, D), in the dtype of the first pair."""
    total_RD = torch.mm(left[0], right[0])
    for left_RO, right_OD in zip(left[1:], right[1:], strict=True):
        total_RD.addmm_(left_RO, right_OD)
    return total_RD


@sum_of_products.register_fake
def _(left: list[Tensor], right: list[Tensor]) -> Tensor:
    return left[0].new_empty(left[0].shape[0], right[0].shape[1])


@torch.library.custom_op("dispfx::sibling_products", mutates_args=())
def sibling_products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Return x · W_iᵀ + b_i of every sibling, differentiable in `x` alone.

    Args:
        x: (…, D).
        weights: (O_i, D) each, of the dtype of `x`.
        biases: (O_i,) each, or none at all.
    """
    bias_list = biases or [None] * len(weights)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, bias_list, strict=True)]


@sibling_products.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.biases = len(inputs[2])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    weights = ctx.saved_tensors
    rows = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    of_x = sum_of_products(rows, list(weights)).view(*grads[0].shape[:-1], weights[0].shape[1])
    return of_x, [None] * len(weights), [None] * ctx.biases


sibling_products.register_autograd(_backward, setup_context=_save)


def join_siblings(graph: fx.Graph, frozen: Collection[fx.Node]) -> int:
    """Compute linear layers that read one value by `sibling_products`, and return how many groups there are.

    Args:
        graph: changed in place.
        frozen: inputs that never need a gradient; layers with another weight or bias are left alone, and so
            are those whose weight is a vector.
    """
    readers: dict[tuple[object, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        if _joins(node, frozen):
            readers.setdefault((node.args[0], len(_parameters(node)) > 1), []).append(node)
    groups = [group for group in readers.values() if len(group) > 1]
    for group in groups:
        weights, *biases = zip(*map(_parameters, group), strict=True)
        operands = (group[0].args[0], list(weights), list(*biases))
        with graph.inserting_before(group[0]):
            together = graph.call_function(torch.ops.dispfx.sibling_products.default, operands)
        for place, node in enumerate(group):
            node.target, node.args, node.kwargs = operator.getitem, (together, place), {}
    graph.lint()
    return len(groups)


def _joins(node: fx.Node, frozen: Collection[fx.Node]) -> bool:
    if packet(node) is not aten.linear:
        return False
    weight, *_ = parameters = _parameters(node)
    return rank(weight) == 2 and all(value in frozen for value in parameters)


def _parameters(linear: fx.Node) -> list[fx.Node]:
    """Return the weight, and the bias where there is one."""
    given = (argument(linear, 1, "weight"), argument(linear, 2, "bias"))
    return [value for value in given if isinstance(value, fx.Node)]
