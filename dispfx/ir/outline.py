"""A program in parts: what comes before the layers, the layers, and what comes after them.

    ids → prologue → x₀, shared values;   x₀ → layer 0 → x₁ → … → x_L → epilogue → logits

A part says what it takes and gives by the names of the program's values and the paths of its tensors;
the work itself is a body.  Layers that do the same on other tensors share one body, so whoever compiles
bodies compiles once a kind of layer, however many layers there are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True, eq=False)
class Body:
    """What a part does: a graph without state.

    Args:
        graph: takes the values and then the tensors of a part, returns a tuple of its results.
    """

    graph: fx.Graph

    def call(self) -> Callable[..., tuple[Any, ...]]:
        """Return the body as a function of the values and tensors."""
        # The module itself would become a child of whatever holds it; it owns nothing.
        return fx.GraphModule(nn.Module(), self.graph, "Body").forward


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a program.

    Args:
        body: shared by parts that differ in their operands only.
        values: names of the values taken, in the body's order; the first is what the part before carries
            on to this one (token ids for the prologue).
        tensors: paths of the parameters and buffers read, in the body's order.
        results: names of the values given, in the body's order; the first is carried on.
    """

    body: Body
    values: tuple[str, ...]
    tensors: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Outline:
    """A program as parts that follow each other.

    Args:
        prologue: gives the stream's first value and everything that several layers share.
        layers: each carries the stream on.
        epilogue: gives what the program returns, in its order.
    """

    prologue: Part
    layers: tuple[Part, ...]
    epilogue: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in order."""
        return (self.prologue, *self.layers, self.epilogue)

    @property
    def kinds(self) -> tuple[Body, ...]:
        """The different bodies of the layers, in order of their first layer."""
        return tuple(dict.fromkeys(layer.body for layer in self.layers))


def body_key(graph: fx.Graph) -> tuple[object, ...]:
    """Return what two graphs have in common exactly when they do the same.

    Operations, constants, order, and shape and dtype of every input; names do not count.
    """
    number = {node: index for index, node in enumerate(graph.nodes)}

    def numbered(argument: object) -> str:
        return str(fx.node.map_arg(argument, lambda node: _Numbered(number[node])))  # type: ignore[arg-type]

    return tuple(
        (node.op, _form(node))
        if node.op == "placeholder"
        else (node.op, str(node.target), numbered(node.args), numbered(node.kwargs))
        for node in graph.nodes
    )


@dataclass(frozen=True)
class _Numbered:
    """A node as its place in the graph."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


def _form(placeholder: fx.Node) -> str:
    value = placeholder.meta["val"]
    if isinstance(value, torch.Tensor):
        return f"{tuple(str(size) for size in value.shape)} {value.dtype}"
    return type(value).__name__
