"""What a value of an ONNX graph was made of: small questions that the rewrites ask.

Every function answers None where the graph is something else; a rewrite then leaves it alone.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

HEADS_FIRST = (0, 2, 1, 3)  # (B, T, heads, size) ↔ (B, heads, T, size)


def made_by(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the node that makes `value` if it is an `operator` of the standard set."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type == operator else None


def only_user(value: ir.Value | None, operator: str) -> ir.Node | None:
    """Return the one node that reads `value` if it is an `operator` and `value` is no output."""
    if value is None or value.is_graph_output() or len(value.uses()) != 1:
        return None
    node = next(iter(value.uses())).node
    return node if node.domain == "" and node.op_type == operator else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """Return the value that is written in the graph."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def integers(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return a small constant of integers as a tuple."""
    found = constant(value)
    if found is None or found.size > 8 or not np.issubdtype(found.dtype, np.integer):
        return None
    return tuple(int(number) for number in found.reshape(-1))


def sizes(value: ir.Value | None) -> tuple[int | None, ...] | None:
    """Return the shape of a value, with None for a size that is free."""
    if value is None or value.shape is None:
        return None
    return tuple(size if isinstance(size, int) else None for size in value.shape)


def size_of(value: ir.Value | None, axis: int, rank: int) -> int | None:
    """Return one fixed size of a value that has `rank` dimensions."""
    shape = sizes(value)
    return shape[axis] if shape is not None and len(shape) == rank else None


def heads_first(value: ir.Value | None) -> ir.Value | None:
    """Return y of `Transpose(y)` that swaps tokens and heads."""
    node = made_by(value, "Transpose")
    if node is None or tuple(node.attributes["perm"].as_ints()) != HEADS_FIRST:
        return None
    return node.inputs[0]


def like(value: ir.Value, name: str, shape: Sequence[int | ir.SymbolicDim | None]) -> ir.Value:
    """Return a new value of the type of `value`."""
    return ir.Value(name=name, type=value.type, shape=ir.Shape(shape))


def integer_constant(graph: ir.Graph, name: str, numbers: Sequence[int]) -> ir.Value:
    """Return an int64 initializer, made once a graph and name."""
    if name not in graph.initializers:
        value = ir.Value(name=name, const_value=ir.tensor(list(numbers), dtype=ir.DataType.INT64, name=name))
        graph.register_initializer(value)
    return graph.initializers[name]
