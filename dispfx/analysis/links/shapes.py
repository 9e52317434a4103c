"""Rules of operations that move, split, join or take dimensions."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import fx

from dispfx.analysis.links.connections import (
    Alternatives,
    Connection,
    Free,
    Link,
    Mixing,
    aligned,
    dimension,
    same,
)
from dispfx.analysis.links.places import indexed_by_constant, taken
from dispfx.analysis.links.reductions import ordered, reduction
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, operand, packet, rank, shape_of


def moved(node: fx.Node) -> list[Connection]:
    """A transpose, permute, movedim or mT: dimension `order[i]` becomes dimension i."""
    value = operand(node, 0)
    order = list(range(rank(value)))
    if packet(node) is aten.permute:
        order = [dimension(value, dim) for dim in argument(node, 1, "dims")]  # type: ignore[union-attr]
    elif packet(node) in (aten.t, aten.numpy_T):
        order.reverse()
    elif packet(node) is aten.movedim:
        order = _order_of_movedim(value, node.args[1], node.args[2])
    elif packet(node) is aten.mT:
        order[-2:] = order[:-3:-1]
    else:
        a, b = dimension(value, node.args[1]), dimension(value, node.args[2])
        order[a], order[b] = order[b], order[a]
    return [link for to, dim in enumerate(order) for link in same(value, dim, node, to)]


def _order_of_movedim(value: fx.Node, sources: object, targets: object) -> list[int]:
    listed = [entry if isinstance(entry, list | tuple) else [entry] for entry in (sources, targets)]
    taken = {dimension(value, to): dimension(value, dim) for dim, to in zip(*listed, strict=True)}
    left = iter(dim for dim in range(rank(value)) if dim not in taken.values())
    return [taken[to] if to in taken else next(left) for to in range(rank(value))]


def reshaped(node: fx.Node) -> list[Connection]:
    """A reshape links groups of dimensions of equal product, from the left.

    1. One dimension on both sides: a link.
    2. One dimension on one side: it is the product of the factors on the other side.
    3. Several on both sides, or a side that has none: their features cannot be told apart, so they mix.
    """
    value = operand(node, 0)
    found: list[Connection] = []
    for before, after in _groups(shape_of(value), shape_of(node)):
        wide = [dim for dim in before if shape_of(value)[dim] != 1]
        narrow = [dim for dim in after if shape_of(node)[dim] != 1]
        if len(wide) == 1 and len(narrow) == 1:
            found += same(value, wide[0], node, narrow[0])
        elif len(wide) == 1 and narrow:
            found.append(_factored(value, wide[0], node, narrow))
        elif len(narrow) == 1 and wide:
            found.append(_factored(node, narrow[0], value, wide))
        else:
            found += [Mixing((value, dim)) for dim in wide] + [Mixing((node, dim)) for dim in narrow]
    return found


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dimensions whose sizes have the same product."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        left, right = list(range(i, min(i + 1, len(before)))), list(range(j, min(j + 1, len(after))))
        while (a := _product(before, left)) != (b := _product(after, right)):
            if a < b and i + len(left) < len(before):
                left.append(i + len(left))
            elif j + len(right) < len(after):
                right.append(j + len(right))
            else:  # sizes that depend on data, which may differ
                return [*groups, (list(range(i, len(before))), list(range(j, len(after))))]
        i, j = i + len(left), j + len(right)
        groups.append((left, right))
    return groups


def _product(sizes: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(sizes[dim] for dim in dims)


def _factored(whole: fx.Node, dim: int, parts: fx.Node, dims: Sequence[int]) -> Alternatives:
    """Return the position in each factor for every position of the whole dimension."""
    sizes = [shape_of(parts)[part] for part in dims]
    index = np.unravel_index(np.arange(shape_of(whole)[dim]), sizes)
    everything = np.arange(shape_of(whole)[dim])
    factors = tuple(
        Link((whole, dim), (parts, part), everything, positions)
        for part, positions in zip(dims, index, strict=True)
    )
    return Alternatives((whole, dim), factors)


def expanded(node: fx.Node) -> list[Connection]:
    """An expand repeats along dimensions that its operand lacks, or that have size one."""
    value = operand(node, 0)
    new = rank(node) - rank(value)
    repeated = [dim for dim in range(rank(node)) if dim < new or shape_of(value)[dim - new] == 1]
    return [*aligned(value, node), *(Free((node, dim)) for dim in repeated)]


def expanded_as(node: fx.Node) -> list[Connection]:
    """Repeated dimensions are as long as those of the operand that lends its shape."""
    return aligned(operand(node, 0), node) + aligned(operand(node, 1), node)


def others(value: fx.Node, node: fx.Node, dim: int) -> list[Connection]:
    """Link every dimension but one with the same dimension of the result."""
    return [link for other in range(rank(value)) if other != dim for link in same(value, other, node, other)]


def sliced(node: fx.Node) -> list[Connection]:
    value = operand(node, 0)
    dim = dimension(value, argument(node, 1, "dim", 0))
    found = others(value, node, dim)
    # How many are taken may depend on the input, as of a table of positions: the table's rows then mix.
    if ops.is_dynamic(value, dim) or ops.is_dynamic(node, dim):
        return found
    return [*found, Link((value, dim), (node, dim), slice_positions(node), np.arange(shape_of(node)[dim]))]


def slice_positions(node: fx.Node) -> np.ndarray:
    """Return the positions of the operand that a slice keeps."""
    size = shape_of(operand(node, 0))[dimension(operand(node, 0), argument(node, 1, "dim", 0))]
    start, stop, step = (
        argument(node, index, name) for index, name in ((2, "start"), (3, "end"), (4, "step"))
    )
    return np.arange(size)[slice(start, stop, step)]


def selected(node: fx.Node) -> list[Connection]:
    value = operand(node, 0)
    gone = dimension(value, node.args[1])
    left = [dim for dim in range(rank(value)) if dim != gone]
    found = [link for to, dim in enumerate(left) for link in same(value, dim, node, to)]
    return [*found, Mixing((value, gone))] if shape_of(value)[gone] != 1 else found


def item(node: fx.Node) -> list[Connection] | None:
    """One result of a split, chunk or unbind."""
    many, index = operand(node, 0), node.args[1]
    rule = _ITEM_RULES.get(packet(many))  # type: ignore[arg-type]
    return rule(node, many, index) if rule is not None and isinstance(index, int) else None


def _split_item(node: fx.Node, many: fx.Node, index: int) -> list[Connection]:
    value = operand(many, 0)
    dim = dimension(value, argument(many, 2, "dim", 0))
    sizes = [ops.size_hint(part.shape[dim]) for part in many.meta["val"]]
    start = sum(sizes[:index])
    found = others(value, node, dim)
    return [
        *found,
        Link((value, dim), (node, dim), np.arange(start, start + sizes[index]), np.arange(sizes[index])),
    ]


def _unbind_item(node: fx.Node, many: fx.Node, index: int) -> list[Connection]:
    value = operand(many, 0)
    gone = dimension(value, argument(many, 1, "dim", 0))
    left = [dim for dim in range(rank(value)) if dim != gone]
    found = [link for to, dim in enumerate(left) for link in same(value, dim, node, to)]
    return [*found, Mixing((value, gone))]


def joined(node: fx.Node) -> list[Connection]:
    values = node.args[0]
    assert isinstance(values, list | tuple)
    dim = dimension(node, argument(node, 1, "dim", 0))
    found: list[Connection] = []
    start = 0
    for value in values:
        assert isinstance(value, fx.Node)
        if shape_of(value) == (0,):
            continue  # torch joins nothing of one dimension with everything, as an empty cache
        size = shape_of(value)[dim]
        found += [
            link for other in range(rank(node)) if other != dim for link in same(value, other, node, other)
        ]
        found.append(Link((value, dim), (node, dim), np.arange(size), np.arange(start, start + size)))
        start += size
    return found


def stacked(node: fx.Node) -> list[Connection]:
    """A stack puts operands side by side along a dimension of its own."""
    values = node.args[0]
    assert isinstance(values, list | tuple)
    new = dimension(node, argument(node, 1, "dim", 0))
    return [
        link
        for value in values
        if isinstance(value, fx.Node)
        for dim in range(rank(value))
        for link in same(value, dim, node, dim if dim < new else dim + 1)
    ]


def paired(node: fx.Node) -> list[Connection]:
    """Pairs along the last dimension become complex numbers, or the reverse; the other dimensions agree."""
    value = operand(node, 0)
    return [link for dim in range(min(rank(value), rank(node))) for link in same(value, dim, node, dim)]


def gated_half(node: fx.Node) -> list[Connection]:
    value = operand(node, 0)
    dim = dimension(value, argument(node, 1, "dim", -1))
    half = shape_of(node)[dim]
    found = others(value, node, dim)
    return [*found, Link((value, dim), (node, dim), np.arange(2 * half), np.arange(2 * half) % half)]


def indexed(node: fx.Node) -> list[Connection] | None:
    """`x[i, …]` by index tensors on leading dimensions: trailing dimensions pass through.

    A constant index says which position goes where, on any one dimension.
    """
    value, indices = operand(node, 0), node.args[1]
    fixed = indexed_by_constant(node)
    if fixed is not None:
        return taken(node, *fixed)
    assert isinstance(indices, list | tuple)
    leading = [dim for dim, index in enumerate(indices) if index is not None]
    # After leading dimensions that stay, as in `x[None, i]` or `x[:, i]`, only one index is supported.
    if len(leading) != 1 and leading != list(range(len(leading))):
        return None
    at, more = leading[0], rank(node) - rank(value)
    found: list[Connection] = [Mixing((value, dim)) for dim in leading]
    for dim in range(at):
        found += same(value, dim, node, dim)
    for dim in range(at + len(leading), rank(value)):
        found += same(value, dim, node, dim + more)
    return found


def repeated(node: fx.Node) -> list[Connection]:
    """`repeat` and `tile` concatenate copies of a dimension."""
    value, given = operand(node, 0), node.args[1]
    assert isinstance(given, list | tuple)
    times = [1] * (rank(node) - len(given)) + list(given)  # `tile` may name the last dimensions alone
    found: list[Connection] = []
    for back in range(1, rank(value) + 1):
        dim, to = rank(value) - back, rank(node) - back
        if times[to] == 1:
            found += same(value, dim, node, to)
        elif not ops.is_dynamic(node, to):
            places = np.arange(shape_of(node)[to])
            found.append(Link((value, dim), (node, to), places % shape_of(value)[dim], places))
    return found


def interleaved(node: fx.Node) -> list[Connection]:
    """`repeat_interleave` by one number puts copies of each position side by side."""
    value, times = operand(node, 0), argument(node, 1, "repeats")
    if argument(node, 2, "dim") is None or not isinstance(times, int):
        return []
    dim = dimension(value, argument(node, 2, "dim"))
    found = others(value, node, dim)
    if ops.is_dynamic(node, dim):
        return found
    places = np.arange(shape_of(node)[dim])
    return [*found, Link((value, dim), (node, dim), places // times, places)]


def scattered(node: fx.Node) -> list[Connection]:
    """Rows of one operand are added at some rows of another; the other dimensions agree."""
    base, rows = operand(node, 0), operand(node, 3)
    if rank(rows) != rank(base):
        return []
    taken = dimension(base, node.args[1])
    return [*others(base, node, taken), *others(rows, node, taken)]


def slice_scattered(node: fx.Node) -> list[Connection]:
    """One operand takes the place of a slice of another; the other dimensions agree."""
    base, part = operand(node, 0), operand(node, 1)
    taken = dimension(base, argument(node, 2, "dim", 0))
    return [*others(base, node, taken), *others(part, node, taken)]


def placed(node: fx.Node) -> list[Connection]:
    """`index_put` writes values where index tensors on leading dimensions say; trailing ones agree."""
    base, indices, values = operand(node, 0), node.args[1], operand(node, 2)
    assert isinstance(indices, list | tuple)
    if not all(isinstance(index, fx.Node) for index in indices):
        return []
    # A mask of n dimensions stands for n of them.
    taken = sum(rank(index) if ops.is_boolean(index) else 1 for index in indices)  # type: ignore[arg-type]
    found = [link for dim in range(taken, rank(base)) for link in same(base, dim, node, dim)]
    for back in range(1, min(rank(base) - taken, rank(values)) + 1):
        found += same(values, rank(values) - back, node, rank(node) - back)
    return found


def index_selected(node: fx.Node) -> list[Connection]:
    value = operand(node, 0)
    fixed = indexed_by_constant(node)
    if fixed is not None:
        return taken(node, *fixed)
    mixed = dimension(value, node.args[1])
    return [*others(value, node, mixed), Mixing((value, mixed))]


def _combined_item(node: fx.Node, many: fx.Node, index: int) -> list[Connection]:
    """One result of a reduction or of an order, as the values of `max`, `topk` or `sort` are."""
    rule = reduction if packet(many) in ops.REDUCTIONS else ordered
    return rule(many, node)


_ITEM_RULES: dict[object, Callable[[fx.Node, fx.Node, int], list[Connection]]] = {
    **dict.fromkeys(ops.REDUCTIONS | ops.ORDERED, _combined_item),
    aten.unbind: _unbind_item,
    **{op: _split_item for op in ops.MULTIPLE if op is not aten.unbind},
}
