"""The one propagation rule: what must be cut together with a dimension.

Entry point: `close`.  Starting from labelled dimensions (position i of this dimension is feature
`labels[i]` of the site), labels spread along the connections of `dispfx.analysis.links` in both directions
until nothing changes.  The labelled axes of parameters are the site's slices.

Rules:
1. A link carries labels from either side to the other.
2. A product that contracts a labelled dimension gets a gate on its activation, and the weight's
   axis is labelled; so both products of a value are gated.  A constant factor of a weight, such as
   the zeros before the first token, is gated like an activation.
3. A mean over a labelled dimension gets a gate on its operand, and divides by the full size.  With
   `statistics="kept"` it divides by the number of kept features, and a fused norm is gated likewise; with
   "none" either refuses the site.
4. A gate hides what follows it: labels do not cross a gated edge.
5. What a graph returns as its cache is what it takes at the next step, so both carry the same labels.
6. If the caller allows it, two labels for one position mean that two features are one: the walk starts
   again with the smaller label for both.
7. An operation without a rule, a softmax or norm over a labelled dimension, a product of two labelled
   activations, or the residual stream itself refuse the site; so do two labels for one position otherwise.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.links import (
    Alternatives,
    Connection,
    Contraction,
    Dimension,
    Link,
    Mixing,
    contractions,
    links,
)
from dispfx.ir import ops
from dispfx.ir.kept_statistics import problem_of
from dispfx.ir.program import Program
from dispfx.ir.sites import UNTOUCHED

Edge = tuple[fx.Node, int, fx.Node]
Statistics = Literal["full", "kept", "none"]
# Features that a product of two activations may keep apart.
Apart = Literal["heads", "values"]

# One walk finds all joins of one value; more walks mean that there are no such features.
_MOST_JOINS = 4


@dataclass(frozen=True)
class Mismatch:
    """Why something does not fit.

    Args:
        reason: what was required and what was found.
        node: the graph node where it was found.
        stream: whether the features are those of the residual stream.
        grouped: whether the features come in groups, or meet another activation, as those of heads do.
        same: (2, N) pairs of labels that one position would follow both of.
        parameter: path of the affected parameter, if known.
        owned: whether a site cuts the features already.
    """

    reason: str
    node: fx.Node | None = None
    stream: bool = False
    grouped: bool = False
    same: np.ndarray | None = None
    parameter: str | None = None
    owned: bool = False


def sums_over_several(product: fx.Node) -> Mismatch | None:
    """Return the mismatch for a product that sums over several dimensions at once."""
    if len(contractions(product)) < 2:
        return None
    reason = f"{ops.operation(product)} sums over several dimensions at once"
    return Mismatch(reason, product, grouped=True)


@dataclass
class Closure:
    """A site under construction: labels by dimension, and the edges that carry its gate.

    Args:
        statistics: those of the edges whose user takes statistics over the kept features only.
    """

    labels: dict[Dimension, np.ndarray] = field(default_factory=dict)
    gates: dict[Edge, np.ndarray] = field(default_factory=dict)
    statistics: set[Edge] = field(default_factory=set)

    @property
    def features(self) -> int:
        """Number of features: one more than the largest label."""
        return 1 + max(int(labels.max()) for labels in self.labels.values())


@dataclass(frozen=True)
class LabelContext:
    """What a closure may not cross.

    Args:
        dependent: nodes that depend on the token ids; all other nodes are weights or constants.
        stream: the residual stream's values.
        writes: (top, addition) edges where a branch writes, which carry the write gates.
        caches: for every cached input or output, the values that are the same cache at another step.
    """

    dependent: frozenset[fx.Node]
    stream: frozenset[fx.Node]
    writes: frozenset[tuple[fx.Node, fx.Node]]
    caches: Mapping[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, flow: Flow) -> "LabelContext":
        """Return what the features of one branch may not cross."""
        nodes = program.nodes
        assert program.stream is not None
        return LabelContext(
            flow.dependent,
            frozenset(nodes[name] for name in program.stream.values),
            frozenset((nodes[leaf.top], nodes[leaf.user]) for leaf in program.leaves),
            program.caches,
        )


class _Refused(Exception):
    def __init__(self, mismatch: Mismatch):
        super().__init__(mismatch.reason)
        self.mismatch = mismatch


def close(
    seeds: list[tuple[Dimension, np.ndarray]],
    context: LabelContext,
    *,
    crosses_products: bool = True,
    joins_features: bool = False,
    apart: Apart | None = None,
    within: Collection[fx.Node] | None = None,
    statistics: Statistics = "full",
) -> Closure | Mismatch:
    """Spread labels from the seeds until nothing changes.

    Args:
        seeds: dimensions and their labels.
        context: what the labels may not cross.
        crosses_products: whether a product may consume a labelled activation; not for writes.
        apart: what the features are, if a product of two activations may keep them apart.
        within: nodes that labels may reach; they stop at all others.
        joins_features: whether features that share a position become one, as long as two are left; at
            most `_MOST_JOINS` times, so that a site costs no more than a few walks.
        statistics: whether means are taken over all features (norms then refuse the site), means and norms
            over kept features, or both refuse the site.
    """
    rules = _Rules(context, crosses_products, apart, within, statistics)
    found = _spread(seeds, rules)
    for _ in range(_MOST_JOINS if joins_features else 0):
        if isinstance(found, Closure) or found.same is None:
            break
        fewer = _joined(max(int(labels.max()) for _, labels in seeds) + 1, found.same)
        if not fewer.any():
            break
        seeds = [(dimension, fewer[labels]) for dimension, labels in seeds]
        found = _spread(seeds, rules)
    return found


@dataclass(frozen=True)
class _Rules:
    """The arguments of `close` that say where labels go."""

    context: LabelContext
    crosses_products: bool
    apart: Apart | None
    within: Collection[fx.Node] | None
    statistics: Statistics


def _spread(seeds: list[tuple[Dimension, np.ndarray]], rules: _Rules) -> Closure | Mismatch:
    walk = _Walk(rules)
    try:
        for dimension, labels in seeds:
            walk.join(dimension, labels)
        walk.run()
    except _Refused as refused:
        return refused.mismatch
    return walk.closure


def _joined(features: int, same: np.ndarray) -> np.ndarray:
    """Renumber the features from 0 after merging every pair of `same` (2, N)."""
    names = np.arange(features)
    while True:
        smaller = np.minimum(names[same[0]], names[same[1]])
        before = names.copy()
        np.minimum.at(names, same[0], smaller)
        np.minimum.at(names, same[1], smaller)
        names = names[names]
        if np.array_equal(names, before):
            return np.unique(names, return_inverse=True)[1].astype(np.int32)


class _Walk:
    """The state of one closure."""

    def __init__(self, rules: _Rules):
        self.closure = Closure()
        self._rules = rules
        self._context = rules.context
        self._cuts: set[tuple[fx.Node, fx.Node]] = set()
        self._pending: list[Dimension] = []

    def join(self, dimension: Dimension, labels: np.ndarray) -> None:
        """Add labels to a dimension; refuse if they disagree with existing ones."""
        node, dim = dimension
        if self._rules.within is not None and node not in self._rules.within:
            return
        if node in self._context.stream:
            raise _Refused(Mismatch("the features reach the residual stream itself", node, stream=True))
        if ops.is_dynamic(node, dim):
            reason = "the features reach a dimension whose size changes between runs"
            if self._rules.apart == "heads":
                reason = f"dimension {dim} of {ops.operation(node)} holds heads and sequences together"
            raise _Refused(Mismatch(reason, node))
        if not len(labels):
            raise _Refused(Mismatch("a layer of width 0 has no features", node))
        known = self.closure.labels.get(dimension)
        if known is None:
            known = np.full(len(labels), UNTOUCHED, dtype=np.int32)
        merged = np.where(labels == UNTOUCHED, known, labels)
        conflicting = (known != UNTOUCHED) & (merged != known)
        if np.any(conflicting):
            raise _two_features(node, np.stack([known[conflicting], merged[conflicting]]))
        if dimension not in self.closure.labels or not np.array_equal(merged, known):
            self.closure.labels[dimension] = merged
            self._pending.append(dimension)
            for twin in self._context.caches.get(node, ()):
                self.join((twin, dim), merged)

    def run(self) -> None:
        while self._pending:
            dimension = self._pending.pop()
            node = dimension[0]
            for place in (node, *ops.consumers(node)):
                self._spread(dimension, place)

    def _spread(self, dimension: Dimension, place: fx.Node) -> None:
        value, dim = dimension
        if value is not place and (value, place) in self._context.writes and dim == ops.rank(value) - 1:
            self._gate(dimension, place)
            return
        if place.op == "output":
            if value in self._context.caches:
                return
            raise _Refused(Mismatch("the features reach the decoder's output", place))
        connections = links(place)
        if connections is None and not ops.operands(place):
            reason = (
                f"{ops.operation(place)} counts the features in the model's code, and no weight holds them"
            )
            raise _Refused(Mismatch(reason, place))
        if connections is None:
            raise _Refused(Mismatch(f"no rule is known for {ops.operation(place)}", place))
        between = ops.contracts(place) and len(ops.activations(place, self._context.dependent)) > 1
        if between and self._rules.apart is None:
            reason = "the features enter a product of two activations"
            raise _Refused(Mismatch(reason, place, grouped=True))
        for connection in connections:
            self._follow(connection, dimension, place)

    def _follow(self, connection: Connection, dimension: Dimension, place: fx.Node) -> None:
        match connection:
            case Link():
                if dimension in (connection.a, connection.b) and not self._cut(connection, place):
                    self._carry(connection, dimension)
            case Alternatives(whole=whole, factors=factors):
                if dimension == whole:
                    self._split(dimension, factors)
                for factor in factors:
                    if dimension == factor.b:
                        self._carry(factor, dimension)
            case Contraction(a=a, b=b):
                if dimension in (a, b):
                    self._contract(dimension, b if dimension == a else a, place)
            case Mixing(operand=operand, average=average):
                if dimension == operand:
                    self._mix(dimension, place, average)

    def _cut(self, link: Link, place: fx.Node) -> bool:
        """Whether the link runs over an edge that carries the gate."""
        return any((end[0], place) in self._cuts for end in (link.a, link.b) if end[0] is not place)

    def _carry(self, link: Link, dimension: Dimension) -> None:
        forward = dimension == link.a
        here, there = (
            (link.a_positions, link.b_positions) if forward else (link.b_positions, link.a_positions)
        )
        target = link.b if forward else link.a
        labels = self.closure.labels[dimension]
        if here is None or there is None:
            self.join(target, labels)
            return
        carried = _carried(labels, here, there, ops.shape_of(target[0])[target[1]])
        if carried is None:
            raise _two_features(target[0], _conflicts(labels, here, there))
        if np.any(carried != UNTOUCHED):
            self.join(target, carried)

    def _split(self, whole: Dimension, factors: tuple[Link, ...]) -> None:
        """Labels of a dimension that a reshape splits must vary along one factor only."""
        labels = self.closure.labels[whole]
        for factor in factors:
            size = ops.shape_of(factor.b[0])[factor.b[1]]
            assert factor.a_positions is not None and factor.b_positions is not None
            carried = _carried(labels, factor.a_positions, factor.b_positions, size)
            if carried is not None:
                self.join(factor.b, carried)
                return
        reason = "a reshape splits the features into groups"
        raise _Refused(Mismatch(reason, factors[0].b[0], grouped=True))

    def _contract(self, labelled: Dimension, other: Dimension, product: fx.Node) -> None:
        labels = self.closure.labels[labelled]
        if self._is_activation(labelled[0]):
            if self._is_activation(other[0]):
                raise _Refused(Mismatch(self._summed(product), product))
            if not self._rules.crosses_products:
                raise _Refused(Mismatch("a written value also feeds a product", product))
            self._gate(labelled, product)
            self.join(other, labels)
        elif self._is_activation(other[0]) or ops.is_filled(other[0]):
            self.closure.gates[(other[0], other[1], product)] = labels
            self._cuts.add((other[0], product))
        else:
            raise _Refused(Mismatch("two weights are multiplied along the features", product))

    def _summed(self, product: fx.Node) -> str:
        if self._rules.apart == "values":
            return f"{ops.operation(product)} sums over the features of the values and another activation"
        return "a product of two activations sums over the heads"

    def _is_activation(self, node: fx.Node) -> bool:
        return node in self._context.dependent and ops.weight_of(node) is None

    def _mix(self, dimension: Dimension, place: fx.Node, average: bool) -> None:
        if self._rules.statistics == "kept" and ops.packet(place) in ops.STATISTICS:
            problem = problem_of(place, *dimension)
            if problem is not None:
                raise _Refused(Mismatch(problem, place))
            # No label stops here: the result of a norm has the features of its operand.
            edge = (*dimension, place)
            self.closure.gates[edge] = self.closure.labels[dimension]
            self.closure.statistics.add(edge)
            return
        if not average or (self._rules.statistics == "none" and ops.packet(place) in ops.STATISTICS):
            reason = f"{ops.operation(place)} combines all features"
            raise _Refused(Mismatch(reason, place, grouped=ops.packet(place) in ops.VIEWS))
        self._gate(dimension, place)

    def _gate(self, dimension: Dimension, user: fx.Node) -> None:
        self.closure.gates[(*dimension, user)] = self.closure.labels[dimension]
        self._cuts.add((dimension[0], user))


def _two_features(node: fx.Node, same: np.ndarray) -> _Refused:
    return _Refused(Mismatch("one position would follow two features", node, same=same))


def _conflicts(labels: np.ndarray, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the pairs (2, N) of labels that arrive at one position, each with the largest there."""
    largest = np.full(there.max() + 1, UNTOUCHED, dtype=np.int32)
    np.maximum.at(largest, there, labels[here])
    arrived = labels[here]
    conflicting = (arrived != UNTOUCHED) & (arrived != largest[there])
    return np.stack([arrived[conflicting], largest[there][conflicting]])


def _carried(labels: np.ndarray, here: np.ndarray, there: np.ndarray, size: int) -> np.ndarray | None:
    """Return the labels of the other dimension, or None where one of its positions gets two."""
    carried = np.full(size, UNTOUCHED, dtype=np.int32)
    np.maximum.at(carried, there, labels[here])
    arrived = labels[here]
    consistent = (arrived == UNTOUCHED) | (arrived == carried[there])
    return carried if bool(consistent.all()) else None
