"""Recompute the sizes and positions that a graph states for cut dimensions.

Entry point: `count_sizes`.  Rules:
1. Sizes of reshapes, expands, splits, pads and constants become the number of positions that stay.
2. A slice, or a constant index, takes the kept ones of its positions: by new bounds if they are evenly
   spaced, otherwise by `index_select`.
3. A roll shifts by the number of kept positions among those that wrap around.
4. A mean over a cut dimension becomes a sum divided by the full size, as in the gated graph.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from dispfx.analysis.links import slice_positions
from dispfx.analysis.links.places import indexed_by_constant, pad_widths, roll_shifts
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, operand, packet
from dispfx.ir.program import Program

# Which positions of every (value, dimension) stay.
Cut = Mapping[tuple[str, int], np.ndarray]

# Kept positions that bounds cannot describe.
SLICE_PREFIX = "dispfx_slice"


def count_sizes(program: Program, cut: Cut) -> dict[str, Tensor]:
    """Rewrite the sizes of cut dimensions; return the index tensors that this needs."""
    nodes = {node.name: node for node in program.graph.nodes}
    tensors: dict[str, Tensor] = {}
    for node in list(nodes.values()):
        if packet(node) is aten.slice or packet(node) in ops.GATHERS:
            _count_positions(program, node, cut, tensors)
    of_kept = {
        user for site in program.sites for point in site.gates if point.statistics for user in point.users
    }
    for node in list(nodes.values()):
        rewrite = _REWRITES.get(packet(node))
        if rewrite is not None and not (packet(node) is aten.mean and node.name in of_kept):
            rewrite(node, cut)
    for (name, dim), stays in cut.items():
        if name in nodes and not stays.all():
            value = nodes[name].meta["val"]
            nodes[name].meta["val"] = value.narrow(dim, 0, int(stays.sum()))
    return tensors


def _count_shape(node: fx.Node, cut: Cut) -> None:
    at = 0 if packet(node) in ops.FACTORIES else 1
    node.update_arg(at, _sizes(node, at, 0, cut))


def _sizes(node: fx.Node, at: int, first: int, cut: Cut) -> list[Any]:
    """Return the sizes that an argument states of the result's dimensions from `first` on."""
    sizes: list[Any] = list(node.args[at])  # type: ignore[arg-type]
    for place, size in enumerate(sizes):
        stays = cut.get((node.name, first + place))
        if stays is not None and isinstance(size, int) and size != -1:
            sizes[place] = int(stays.sum())
    return sizes


def _count_norm(node: fx.Node, cut: Cut) -> None:
    value, sizes = operand(node, 0), list(argument(node, 1, "normalized_shape"))  # type: ignore[call-overload]
    stays = cut.get((value.name, ops.rank(value) - 1))
    if stays is not None:
        node.update_arg(1, [*sizes[:-1], int(stays.sum())])


def _count_factors(node: fx.Node, cut: Cut) -> None:
    dim = node.args[1]
    assert isinstance(dim, int)
    node.update_arg(2, _sizes(node, 2, dim % ops.rank(operand(node, 0)), cut))


def _count_parts(node: fx.Node, cut: Cut) -> None:
    value = operand(node, 0)
    dim = argument(node, 2, "dim", 0) % ops.rank(value)  # type: ignore[operator]
    stays = cut.get((value.name, dim))
    if stays is None:
        return
    sizes = [ops.size_hint(part.shape[dim]) for part in node.meta["val"]]
    ends = np.cumsum(sizes)
    counted = [int(stays[end - size : end].sum()) for size, end in zip(sizes, ends, strict=True)]
    node.target = aten.split_with_sizes.default
    node.args, node.kwargs = (value, counted, dim), {}


def _count_positions(program: Program, node: fx.Node, cut: Cut, tensors: dict[str, Tensor]) -> None:
    """Take the kept ones of the positions of a slice or a constant index (rule 2)."""
    value = operand(node, 0)
    found = _positions(node, value, cut)
    if found is None:
        return
    dim, positions = found
    stays = cut[value.name, dim]
    renumbered = np.cumsum(stays) - 1
    taken = renumbered[positions[stays[positions]]].tolist()
    steps = set(np.diff(taken).tolist())
    if taken and packet(node) is aten.slice and len(steps) <= 1:
        node.args, node.kwargs = (value, dim, taken[0], taken[-1] + 1, steps.pop() if steps else 1), {}
        return
    path = f"{SLICE_PREFIX}.{node.name}"
    tensors[path] = torch.tensor(taken, dtype=torch.int32, device=program.device)
    with program.graph.inserting_before(node):
        index = program.graph.create_node("get_attr", path, name=path.replace(".", "_"))
    index.meta["val"] = torch.empty(len(taken), dtype=torch.int32, device="meta")
    node.target = aten.index_select.default
    node.args, node.kwargs = (value, dim, index), {}


def _positions(node: fx.Node, value: fx.Node, cut: Cut) -> tuple[int, np.ndarray] | None:
    """Return the cut dimension from which a node takes positions, and these positions, or None."""
    if packet(node) is aten.slice:
        dim = argument(node, 1, "dim", 0) % ops.rank(value)  # type: ignore[operator]
        return (dim, slice_positions(node)) if (value.name, dim) in cut else None
    if not any((value.name, dim) in cut for dim in range(ops.rank(value))):
        return None
    found = indexed_by_constant(node)
    return found if found is not None and (value.name, found[0]) in cut else None


def _count_shifts(node: fx.Node, cut: Cut) -> None:
    """A roll by s moves the last s positions to the front: count the kept ones of them (rule 3)."""
    value = operand(node, 0)
    shifts = roll_shifts(node)
    for dim in shifts:
        stays = cut.get((value.name, dim))
        if stays is not None:
            shifts[dim] = int(stays[len(stays) - shifts[dim] % len(stays) :].sum())
    if shifts:
        node.args, node.kwargs = (value, list(shifts.values()), list(shifts)), {}


def _count_pads(node: fx.Node, cut: Cut) -> None:
    """A pad adds, or cuts off, the kept ones of its positions."""
    value = operand(node, 0)
    counted: list[object] = []
    for dim, (left, right) in reversed(list(enumerate(pad_widths(node)))):
        before, after = cut.get((value.name, dim)), cut.get((node.name, dim))
        counted += [_counted(left, before, after), _counted(right, _turned(before), _turned(after))]
    node.update_arg(1, counted[: len(node.args[1])])  # type: ignore[arg-type]


def _counted(width: object, before: np.ndarray | None, after: np.ndarray | None) -> object:
    if not isinstance(width, int) or width == 0:
        return width
    if width > 0:
        return width if after is None else int(after[:width].sum())
    return width if before is None else -int(before[:-width].sum())


def _turned(stays: np.ndarray | None) -> np.ndarray | None:
    return None if stays is None else stays[::-1]


def _count_groups(node: fx.Node, cut: Cut) -> None:
    """A depthwise convolution has as many groups as channels."""
    stays = cut.get((node.name, 1))
    if stays is None or not ops.is_depthwise(node):
        return
    if packet(node) is aten.convolution:
        node.update_arg(8, int(stays.sum()))
    else:
        node.args = node.args[:6]
        node.kwargs = {**node.kwargs, "groups": int(stays.sum())}


def _keep_divisor(node: fx.Node, cut: Cut) -> None:
    """A mean over a cut dimension is a sum over the kept features divided by the full size (rule 4)."""
    value = operand(node, 0)
    dims = argument(node, 1, "dim")
    listed = dims if isinstance(dims, list | tuple) else [dims]
    reduced = [dim % ops.rank(value) for dim in listed if isinstance(dim, int)] or list(
        range(ops.rank(value))
    )
    narrowed = {dim: cut[value.name, dim] for dim in reduced if (value.name, dim) in cut}
    if not narrowed:
        return
    fixed = not any(ops.is_dynamic(value, dim) for dim in reduced)
    sizes = ops.shape_of(value)
    divisor: float = math.prod(sizes[dim] for dim in reduced)
    if not fixed:  # already divided by the size that is left
        divisor = math.prod(len(stays) / int(stays.sum()) for stays in narrowed.values())
    with node.graph.inserting_after(node):
        divided = node.graph.call_function(aten.div.Tensor, (node, divisor))
    divided.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(divided, delete_user_cb=lambda user: user is not divided)
    if fixed:
        node.target = aten.sum.dim_IntList
        kwargs = {name: given for name, given in node.kwargs.items() if name == "dtype"}
        node.args, node.kwargs = (value, reduced, bool(argument(node, 2, "keepdim", False))), kwargs


_REWRITES = {
    **dict.fromkeys(ops.packets("reshape view expand") | ops.FACTORIES, _count_shape),
    aten.unflatten: _count_factors,
    **dict.fromkeys(ops.packets("split split_with_sizes chunk unsafe_split unsafe_chunk"), _count_parts),
    **dict.fromkeys(ops.packets("new_ones new_zeros new_full new_empty"), _count_shape),
    **dict.fromkeys(ops.CONVOLUTIONS, _count_groups),
    aten.mean: _keep_divisor,
    aten.roll: _count_shifts,
    **dict.fromkeys(ops.packets("pad constant_pad_nd"), _count_pads),
    **dict.fromkeys(ops.packets("layer_norm rms_norm"), _count_norm),
}
