"""Rules of operations that move positions by constants: flips, rolls, pads, and fixed indices."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dispfx.analysis.links.connections import Connection, Link, Mixing, dimension, same
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, operand, packet, rank, shape_of

# A longer index is not an order of features.
_MOST_POSITIONS = 2**20


def flipped(node: fx.Node) -> list[Connection]:
    value = operand(node, 0)
    turned = {dimension(value, dim) for dim in _listed(node.args[1])}
    found: list[Connection] = []
    for dim in range(rank(value)):
        if dim not in turned:
            found += same(value, dim, node, dim)
        elif not ops.is_dynamic(value, dim):
            places = np.arange(shape_of(value)[dim])
            found.append(Link((value, dim), (node, dim), places, places[::-1]))
    return found


def rolled(node: fx.Node) -> list[Connection]:
    """Without dimensions all of them are rolled as one, and none stays apart."""
    value = operand(node, 0)
    shifts = roll_shifts(node)
    if not shifts:
        return []
    found: list[Connection] = []
    for dim in range(rank(value)):
        if dim not in shifts:
            found += same(value, dim, node, dim)
        elif not ops.is_dynamic(value, dim):
            places = np.arange(shape_of(value)[dim])
            found.append(Link((value, dim), (node, dim), places, (places + shifts[dim]) % len(places)))
    return found


def roll_shifts(node: fx.Node) -> dict[int, int]:
    """Return by how many positions each dimension is rolled."""
    value = operand(node, 0)
    shifts: dict[int, int] = {}
    for shift, dim in zip(_listed(node.args[1]), _listed(argument(node, 2, "dims", [])), strict=False):
        at = dimension(value, dim)
        shifts[at] = shifts.get(at, 0) + shift
    return shifts


def padded(node: fx.Node) -> list[Connection]:
    """Positions that a pad adds are constants and follow no feature; negative pads cut positions off.

    A pad that repeats or mirrors positions is known where it changes nothing.
    """
    value = operand(node, 0)
    found: list[Connection] = []
    for dim, (left, right) in enumerate(pad_widths(node)):
        if left == right == 0:
            found += same(value, dim, node, dim)
        elif isinstance(left, int) and pads_with_constant(node) and not ops.is_dynamic(value, dim):
            here = np.arange(shape_of(value)[dim])
            there = here + left
            inside = (there >= 0) & (there < shape_of(node)[dim])
            found.append(Link((value, dim), (node, dim), here[inside], there[inside]))
    return found


def pad_widths(node: fx.Node) -> list[tuple[object, object]]:
    """Return how many positions are added before and after each dimension; negative ones are cut off."""
    given = _listed(node.args[1])
    widths: list[tuple[object, object]] = [(0, 0)] * rank(node)
    for back, pair in enumerate(zip(given[::2], given[1::2], strict=True)):
        widths[rank(node) - 1 - back] = pair
    return widths


def pad_fill(node: fx.Node) -> object:
    """Return the number that a pad by a constant adds."""
    is_plain = packet(node) is aten.constant_pad_nd
    return argument(node, 2 if is_plain else 3, "value", 0) or 0


def pads_with_constant(node: fx.Node) -> bool:
    """Whether what a pad adds is one number, and not taken from the operand."""
    return packet(node) is aten.constant_pad_nd or argument(node, 2, "mode", "constant") == "constant"


def indexed_by_constant(node: fx.Node) -> tuple[int, np.ndarray] | None:
    """Return the dimension, and the positions of it, that an index takes which is a constant."""
    value = operand(node, 0)
    if packet(node) is aten.index_select:
        dim, index = dimension(value, node.args[1]), node.args[2]
    else:
        indices = _listed(node.args[1])
        places = [dim for dim, entry in enumerate(indices) if entry is not None]
        if len(places) != 1:
            return None
        dim, index = places[0], indices[places[0]]
    if not isinstance(index, fx.Node) or rank(index) != 1 or ops.is_dynamic(value, dim):
        return None
    positions = constant_value(index)
    if positions is None:
        return None
    size = shape_of(value)[dim]
    if positions.dtype == torch.bool:
        positions = positions.nonzero().flatten()
    taken = positions.numpy()
    return dim, np.where(taken < 0, taken + size, taken)


def taken(node: fx.Node, dim: int, positions: np.ndarray) -> list[Connection]:
    """Link a dimension from which an index takes known positions; other dimensions pass through."""
    value = operand(node, 0)
    found = [link for other in range(rank(value)) if other != dim for link in same(value, other, node, other)]
    if len(np.unique(positions)) == 0:
        return [*found, Mixing((value, dim))]
    return [*found, Link((value, dim), (node, dim), positions, np.arange(len(positions)))]


def constant_value(node: fx.Node) -> Tensor | None:
    """Return the value of a short tensor of numbers that the graph holds or computes from what it holds."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    if value.is_floating_point() or value.numel() > _MOST_POSITIONS:
        return None
    if node.op == "get_attr":
        held = ops.held(node)
        return None if held is None or held.is_meta else held.detach().cpu()
    if node.op != "call_function" or ops.mutates(node):
        return None
    inputs = {source: constant_value(source) for source in node.all_input_nodes}
    if any(found is None for found in inputs.values()) or not (inputs or packet(node) in _MADE):
        return None
    args, kwargs = (map_arg(part, lambda source: inputs[source]) for part in (node.args, node.kwargs))
    device = {"device": "cpu"} if "device" in kwargs else {}
    result = node.target(*args, **{**kwargs, **device})  # type: ignore[operator]
    return result if isinstance(result, Tensor) else None


_MADE = ops.packets("arange") | ops.FACTORIES


def _listed(given: object) -> Sequence:
    return list(given) if isinstance(given, list | tuple) else [given]
