"""Whether each of several stacked experts may keep its own features.

    gate_up = grouped(x_RD, w_EDN, ends)         position r of dimension 0 belongs to the expert whose run of
    h = act(gate_up)                             positions holds r; every labelled value says which this is
    y = grouped(h, v_END, ends)

Entry point: `by_expert`.  A closure (see `dispfx.analysis.label_map`) found for features that all experts
share holds for features of each expert under these rules:

1. Every parameter that it cuts is a stack of matrices along axis 0, of one length.
2. Every value that it labels has a dimension whose positions each belong to one expert: a view of a stack,
   a gather from it by a vector of expert numbers, a product with it that is taken run by run or matrix by
   matrix, or a value computed from such ones that agree.
3. Every gate is on such a value, along dimension 0, before a product with a stack that uses the matrix of the
   same expert for each position.
4. Labels are the features of one expert in order, tiled or each repeated: what a slice or split takes then
   depends only on the number of kept features.

A vector of expert numbers and the ends of runs are equivalent if the numbers are sorted and the ends are the
running sum of their counts.  Invalid numbers are not counted and are sorted after all runs, where no product
takes them; clamping them for a gather changes nothing.
"""

import operator
from dataclasses import dataclass

import numpy as np
from torch import fx

from dispfx.analysis.label_map import Closure, Mismatch
from dispfx.analysis.links import Link, links
from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, packet, rank, shape_of
from dispfx.ir.sites import Rows


@dataclass(frozen=True)
class Owner:
    """Which expert each position of one dimension of a value belongs to.

    Args:
        axis: the dimension.
        by: the vector of experts; None if position e belongs to expert e.
        ends: whether `by` holds the ends of the experts' runs instead of a number for each position.
    """

    axis: int
    by: fx.Node | None = None
    ends: bool = False

    @property
    def rows(self) -> Rows:
        """The same by the value's name."""
        if self.by is None:
            return Rows("positions")
        return Rows("ends" if self.ends else "ids", self.by.name)


@dataclass(frozen=True)
class ByExpert:
    """A closure in which every expert has its own features.

    Args:
        experts: number of experts.
        owners: of every labelled value.
    """

    experts: int
    owners: dict[fx.Node, Owner]


def by_expert(closure: Closure) -> ByExpert | Mismatch:
    """Return the owners of a closure's values, or why the experts must share one selection."""
    parameters = [(node, dim) for node, dim in closure.labels if node.op == "get_attr"]
    lengths = {shape_of(node)[0] for node, dim in parameters if rank(node) > 1 and dim > 0}
    if any(rank(node) < 2 or dim == 0 for node, dim in parameters) or len(lengths) != 1:
        return Mismatch("the weights are not stacks of one length")
    if len({node for node, _ in closure.labels}) < len(closure.labels):
        return Mismatch("a value has the features along two dimensions")
    experts = lengths.pop()
    if experts < 2:
        return Mismatch("there is one expert")
    irregular = next((at for at, labels in closure.labels.items() if not _is_regular(labels)), None)
    if irregular is not None:
        return Mismatch("the features are not adjacent and in order", irregular[0])
    found = _owners(closure)
    if isinstance(found, Mismatch):
        return found
    for value, dim, user in closure.gates:
        if not _gate_agrees(closure, found, value, dim, user):
            return Mismatch("the expert at a gate is not known", value)
    return ByExpert(experts, found)


def _is_regular(labels: np.ndarray) -> bool:
    """Whether labels are all features in order, n times side by side or each n times (rule 4)."""
    features = int(labels.max()) + 1
    if len(labels) % features:
        return False
    times = len(labels) // features
    in_order = np.arange(features)
    return np.array_equal(labels, np.tile(in_order, times)) or np.array_equal(
        labels, np.repeat(in_order, times)
    )


def _owners(closure: Closure) -> dict[fx.Node, Owner] | Mismatch:
    """Return the owner of every labelled value, from the parameters on (rule 2)."""
    dims = dict(closure.labels.keys())
    owners: dict[fx.Node, Owner] = {}
    for node in sorted(dims):
        found = _owner(node, dims, owners)
        if found is None or found.axis == dims[node]:
            return Mismatch("the expert of a value is not known", node)
        owners[node] = found
    return owners


def _owner(node: fx.Node, dims: dict[fx.Node, int], owners: dict[fx.Node, Owner]) -> Owner | None:
    if node.op == "get_attr":
        return Owner(0)
    if node.op != "call_function":
        return None
    if ops.is_grouped(node):
        stack = owners.get(node.args[1])  # type: ignore[arg-type]
        return _run_owner(node.args[2]) if stack == Owner(0) else None
    gathered = _gather(node, owners)
    if gathered is not None:
        return gathered
    return _common(node, dims, owners)


def _gather(node: fx.Node, owners: dict[fx.Node, Owner]) -> Owner | None:
    """Return the owner of rows of a stack that a vector of expert numbers takes."""
    if owners.get(node.args[0]) != Owner(0):  # type: ignore[arg-type]
        return None
    index: object = None
    if packet(node) is aten.index:
        indices = node.args[1]
        index = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    elif packet(node) is aten.index_select and argument(node, 1, "dim") == 0:
        index = argument(node, 2, "index")
    if not isinstance(index, fx.Node) or rank(index) != 1 or ops.is_boolean(index):
        return None
    return Owner(0, _numbers(index, shape_of(node.args[0])[0]))  # type: ignore[arg-type]


def _common(node: fx.Node, dims: dict[fx.Node, int], owners: dict[fx.Node, Owner]) -> Owner | None:
    """Return the owner that all labelled operands imply, each through the link of its dimension."""
    given: dict[fx.Node, set[Owner]] = {}
    for link in links(node) or ():
        if not isinstance(link, Link):
            continue
        for (value, dim), (other, to) in ((link.a, link.b), (link.b, link.a)):
            if other is not node or value is node or value not in owners:
                continue
            here = given.setdefault(value, set())
            owner = owners[value]
            if dim == owner.axis and link.a_positions is None:
                here.add(Owner(to, owner.by, owner.ends))
    found = {owner for several in given.values() for owner in several}
    if len(found) != 1 or not all(given.values()):
        return None
    return found.pop()


def _gate_agrees(
    closure: Closure, owners: dict[fx.Node, Owner], value: fx.Node, dim: int, user: fx.Node
) -> bool:
    """Whether a product takes, at each position of a gated value, the matrix of its expert (rule 3)."""
    owner = owners.get(value)
    if owner is None or owner.axis != 0 or (value, dim) not in closure.labels or not ops.is_product(user):
        return False
    if owner.by is not None and not owner.ends and shape_of(owner.by)[0] != shape_of(value)[0]:
        return False
    stacks = [other for other in ops.operands(user) if other in owners and other is not value]
    if len(stacks) != 1:
        return False
    stack = owners[stacks[0]]
    if ops.is_grouped(user):
        return stack == Owner(0) and owner == _run_owner(user.args[2])
    if (stack.by, stack.ends) != (owner.by, owner.ends):
        return False
    reached = [_reached(user, operand_node, owners[operand_node].axis) for operand_node in (value, stacks[0])]
    return reached[0] is not None and reached[0] == reached[1]


def _reached(node: fx.Node, value: fx.Node, dim: int) -> int | None:
    """Return the dimension of the result that one of an operand's becomes, position by position."""
    for link in links(node) or ():
        if isinstance(link, Link) and link.a_positions is None:
            for here, (other, to) in ((link.a, link.b), (link.b, link.a)):
                if here == (value, dim) and other is node:
                    return to
    return None


def _run_owner(ends: object) -> Owner | None:
    """Return the owner of positions that lie in runs; by number where that is known to be the same."""
    if not isinstance(ends, fx.Node):
        return None
    numbers = _numbers_behind(ends)
    return Owner(0, ends, ends=True) if numbers is None else Owner(0, numbers)


def _numbers_behind(ends: fx.Node) -> fx.Node | None:
    """Return the sorted expert numbers whose cumulative counts are the ends, or None."""
    total = _same_values(ends)
    if packet(total) is not aten.cumsum or argument(total, 1, "dim") not in (0, -1):
        return None
    counts = _same_values(total.args[0])  # type: ignore[arg-type]
    size = shape_of(ends)[0]
    counted_all = (packet(counts) is aten.histc and tuple(counts.args[1:]) == (size, 0, size - 1)) or (
        packet(counts) is aten.bincount and len(counts.args) > 2 and counts.args[1:3] == (None, size)
    )
    if not counted_all:
        return None
    numbers = _numbers(counts.args[0], size)  # type: ignore[arg-type]
    return numbers if _is_sorted(numbers) else None


def _is_sorted(numbers: fx.Node) -> bool:
    """Whether a vector is the first result of a sort, or gathered by where a sort puts its own values."""
    if rank(numbers) != 1:
        return False
    sort = _sort_behind(numbers, 0)
    if sort is not None:
        return _rises(sort)
    indices = numbers.args[1] if packet(numbers) is aten.index else None
    order = indices[0] if isinstance(indices, list | tuple) and len(indices) == 1 else None
    if not isinstance(order, fx.Node):
        return False
    sort = _sort_behind(order, 1) or order
    if packet(sort) not in (aten.sort, aten.argsort) or not _rises(sort):
        return False
    return _is_same_view(sort.args[0], numbers.args[0])


def _is_same_view(a: object, b: object) -> bool:
    """Whether two values are one, or the same views of one."""
    while a is not b:
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or packet(a) not in ops.VIEWS:
            return False
        if (a.target, a.args[1:], a.kwargs) != (b.target, b.args[1:], b.kwargs):
            return False
        a, b = a.args[0], b.args[0]
    return True


def _sort_behind(node: fx.Node, result: int) -> fx.Node | None:
    """Return the sort that a value is result number `result` of, or None."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == result else None
    return source if isinstance(source, fx.Node) and packet(source) is aten.sort else None


def _rises(sort: fx.Node) -> bool:
    # The overload with `stable` takes it, and all that follows, by name.
    return not argument(sort, 2, "descending", False) and argument(sort, 1, "dim", -1) in (0, -1)


def _numbers(node: fx.Node, experts: int) -> fx.Node:
    """Strip casts, and clamps to the range of expert numbers: other numbers belong to no expert."""
    while True:
        node = _same_values(node)
        low, high = argument(node, 1, "min"), argument(node, 2, "max")
        if packet(node) is not aten.clamp or not isinstance(node.args[0], fx.Node):
            return node
        if not (low is None or (isinstance(low, int) and low <= 0)):
            return node
        if not (high is None or (isinstance(high, int) and high >= experts - 1)):
            return node
        node = node.args[0]


def _same_values(node: fx.Node) -> fx.Node:
    """Strip casts and copies, which keep expert numbers."""
    while packet(node) in ops.CASTS | ops.COPIES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
