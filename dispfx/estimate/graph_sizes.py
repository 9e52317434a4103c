"""How large every value of a graph is at a batch and a length that were not traced."""

import math
from typing import Any

from torch import Tensor, fx

from dispfx.ir import ops


class Sizes:
    """Shapes and bytes of a graph's values.

    Args:
        graph: of a program; its first input has shape (batch, tokens).
        batch: sequences.
        tokens: tokens a sequence.
    """

    def __init__(self, graph: fx.Graph, batch: int, tokens: int):
        self.batch = batch
        self.tokens = tokens
        ids = next(node for node in graph.nodes if node.op == "placeholder")
        dynamic = zip(ids.meta["val"].shape, (batch, tokens), strict=True)
        self._symbols = {size.node.expr: value for size, value in dynamic if not isinstance(size, int)}
        self._known: dict[Any, int] = {}

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of a tensor value.

        A size that depends on data is taken for the number of tokens, which is what a router sends on.
        """
        return tuple(self._size(size) for size in node.meta["val"].shape)

    def count(self, node: fx.Node) -> int:
        """Return the number of elements of a tensor value."""
        return math.prod(self.shape(node))

    def bytes(self, node: fx.Node) -> int:
        """Return the bytes of a tensor value; 0 where the value is no tensor."""
        value = node.meta.get("val")
        return self.count(node) * value.element_size() if isinstance(value, Tensor) else 0

    def _size(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._known:
            value = expression.subs(self._symbols)
            self._known[expression] = int(value) if value.is_number else self.batch * self.tokens
        return self._known[expression]


def storage(node: fx.Node) -> object:
    """Return a key that two values have in common exactly where they share memory.

    A gate's result is new, though it carries the description of its operand.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or ops.is_gate(node):
        return node
    return value.untyped_storage()._cdata
