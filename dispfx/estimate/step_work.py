"""How many operations one step of learning takes: products forward, and back to the activations.

A product of an activation and a weight costs 2 · weights · rows, and as much again for the gradient of
the activation where that needs one; weights are frozen and get none.  Attention costs two products
forward and five back, since its fused kernels compute the scores again.  Everything else is left out.
"""

import math
from dataclasses import dataclass

from torch import fx

from dispfx.analysis.links import contractions
from dispfx.estimate.graph_sizes import Sizes
from dispfx.ir import ops


@dataclass(frozen=True)
class StepWork:
    """Floating-point operations of one step, a multiplication and an addition counted as two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Both."""
        return self.forward + self.backward


def step_work(graph: fx.Graph, needs: frozenset[fx.Node], sizes: Sizes) -> StepWork:
    """Return the operations of one step of a gated graph.

    Args:
        needs: values that need a gradient.
        sizes: of the graph at the batch and length of a step.
    """
    forward = backward = 0
    for node in graph.nodes:
        operands = [value for value in ops.operands(node) if ops.is_tensor(value)]
        if ops.packet(node) in ops.ATTENTION:
            query, key, value = operands[:3]
            rows = math.prod(sizes.shape(query)[:-1]) * sizes.shape(key)[-2]
            forward += 2 * rows * (sizes.shape(query)[-1] + sizes.shape(value)[-1])
            backward += (
                2 * rows * (3 * sizes.shape(query)[-1] + 2 * sizes.shape(value)[-1]) if node in needs else 0
            )
        elif ops.packet(node) in ops.PRODUCTS:
            one = operations_of(node, sizes)
            forward += one
            backward += one * sum(value in needs for value in operands)
    return StepWork(forward, backward)


def operations_of(product: fx.Node, sizes: Sizes) -> int:
    """Return the operations of one product, a multiplication and an addition counted as two."""
    operands = [value for value in ops.operands(product) if ops.is_tensor(value)]
    return 2 * sizes.count(product) * _summed(product, operands, sizes)


def _summed(node: fx.Node, operands: list[fx.Node], sizes: Sizes) -> int:
    """Return how many products each element of the result sums."""
    if ops.packet(node) in ops.CONVOLUTIONS:
        return math.prod(sizes.shape(operands[1])[1:])
    sums = contractions(node)
    if sums:
        return math.prod(sizes.shape(value)[dim] for value, dim in (one.a for one in sums))
    return sizes.shape(operands[0])[-1]
