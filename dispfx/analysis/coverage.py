"""Which weights of a decoder's layers the sites cut, and why the rest is not cut.

Entry points: `coverage`, and `unnamed`, which names what the search for sites left out silently.  Every
parameter is counted exactly once, by these rules:

1. A weight has two dimensions or more.  Norm weights and biases follow what they belong to and are not
   counted.
2. A weight that no branch reads, such as embedding and head, is outside the layers.
3. Any other weight is a block weight: gated if a site cuts one of its axes, otherwise not gated.
4. The reason why an axis stays is found by spreading labels from it, and from the dimension that a product
   sums with it, as in the search for sites: the reason is what stops the labels.
5. A reason that no refusal of the branch gives becomes one, with the operation's line; but for what is never
   pruned, such as heads and the taps of a convolution.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.label_map import Closure, LabelContext, Mismatch, Statistics, close, sums_over_several
from dispfx.analysis.links import Dimension
from dispfx.analysis.zero_values import not_zero
from dispfx.ir import ops
from dispfx.ir.program import Leaf, Program, require_program
from dispfx.ir.sites import STREAM, Refusal

HEADS = {
    "attention": "attention's inner dimension: heads are not pruned",
    "mixer": "a mixer's inner dimension: what it combines over tokens is not pruned",
}
EXPERTS = "experts chosen by a router are not pruned"
UNREAD = "not read by the graph"
SKIPPED = "left out on request"
UNSUMMED = "no product of a branch sums over it"
_NEVER = frozenset((*HEADS.values(), EXPERTS, UNREAD, SKIPPED))

_CHOICES = ops.ORDERED | ops.GATHERS | ops.packets("gather scatter one_hot select")


@dataclass(frozen=True)
class Ungated:
    """Block weights that no site cuts, for one reason.

    Args:
        reason: what stops the features of their axes.
        size: number of parameters.
        parameters: their paths.
    """

    reason: str
    size: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """The block weights of a decoder; `gated` and the sizes of `ungated` add up to `total`.

    Args:
        gated: elements of weights that a site cuts along some axis.
        total: elements of all block weights.
        ungated: all other block weights, by reason, the largest first.
        axes: axes (path, axis) of gated weights that no site cuts, by reason.
    """

    gated: int
    total: int
    ungated: tuple[Ungated, ...] = ()
    axes: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of the weights that is gated; 1 if there are no weights."""
        return self.gated / self.total if self.total else 1.0


def coverage(program: Program) -> Coverage:
    """Return which block weights the sites of an analysed program cut, and why the rest is not cut."""
    require_program(program)
    search = _Reasons(program)
    shapes = search.block_weights()
    sizes = {path: prod(shape) for path, shape in shapes.items()}
    cut = {(piece.parameter, piece.axis) for site in program.sites for piece in site.slices}
    gated = {path for path, _ in cut} & sizes.keys()
    left: dict[str, list[str]] = {}
    axes: dict[str, list[tuple[str, int]]] = {}
    for path, shape in shapes.items():
        whole = [axis for axis, size in enumerate(shape) if size > 1 and (path, axis) not in cut]
        reasons = {axis: search.stop(path, axis).reason for axis in whole}
        if path not in gated:
            left.setdefault("; ".join(dict.fromkeys(reasons.values())), []).append(path)
            continue
        for axis, reason in reasons.items():
            axes.setdefault(reason, []).append((path, axis))
    ungated = [
        Ungated(reason, sum(sizes[path] for path in paths), tuple(sorted(paths)))
        for reason, paths in left.items()
    ]
    return Coverage(
        sum(sizes[path] for path in gated),
        sum(sizes.values()),
        tuple(sorted(ungated, key=lambda one: (-one.size, one.reason))),
        {reason: tuple(found) for reason, found in axes.items()},
    )


def unnamed(program: Program) -> list[Refusal]:
    """Return refusals of an analysed program for what no site cuts and no refusal names (rule 5)."""
    search = _Reasons(program)
    cut = {(piece.parameter, piece.axis) for site in program.sites for piece in site.slices}
    named = {(one.name.rpartition(".")[0], one.reason) for one in program.refused}
    found: list[Refusal] = []
    for path, shape in search.block_weights().items():
        branch = search.branch_of(path)
        for axis in [axis for axis, size in enumerate(shape) if size > 1 and (path, axis) not in cut]:
            stop = search.stop(path, axis) if branch is not None else None
            if branch is None or stop is None or not search.is_news(branch, stop, axis):
                continue
            if (branch, stop.reason) not in named:
                named.add((branch, stop.reason))
                line = None if stop.node is None else ops.source_line(stop.node)
                found.append(Refusal(f"{branch}.inner", stop.reason, path, line))
    return found


class _Reasons:
    """Finds the reason for every axis that stays."""

    def __init__(self, program: Program):
        assert program.stream is not None
        self.program = program
        self.flow = Flow.of(program.graph)
        self.around = LabelContext.of(program, self.flow)
        self.nodes = program.nodes
        self.weights = {str(node.target): node for node in program.graph.nodes if node.op == "get_attr"}
        self.leaf_of = {name: leaf for leaf in program.leaves for name in leaf.nodes}
        self.whole_stream = any(site.kind == STREAM for site in program.sites)

    def block_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights that some branch reads, or that nothing reads (rule 3)."""
        inside = self._inside()
        return {
            path: shape
            for path, shape in self.program.shapes.items()
            if len(shape) > 1 and prod(shape) > 1
            and (path not in self.weights or any(user in inside for user in self._readers(path)))
        }  # fmt: skip

    def _inside(self) -> set[fx.Node]:
        """Return the nodes between the stream and what is written into it, in refused branches too."""
        assert self.program.stream is not None
        inside: set[fx.Node] = set()
        for write in (self.nodes[name] for name in self.program.stream.writes):
            for operand in set(self.flow.inputs(write)) - self.around.stream:
                inside |= self.flow.cone(operand, stop=self.around.stream.__contains__)[0]
        return inside

    def _readers(self, path: str) -> Iterator[fx.Node]:
        """Yield what depends on the token ids and takes the weight, or what is computed from it."""
        pending, seen = [self.weights[path]], set()
        while pending:
            for user in pending.pop().users:
                if user in self.flow.dependent:
                    yield user
                elif user not in seen and user.op != "output":
                    seen.add(user)
                    pending.append(user)

    def branch_of(self, path: str) -> str | None:
        """Return the branch that reads a weight first, or None without such a branch."""
        if path not in self.weights:
            return None
        leaves = (self.leaf_of.get(user.name) for user in self._readers(path))
        return next((leaf.branch for leaf in leaves if leaf is not None), None)

    def is_news(self, branch: str, stop: Mismatch, axis: int) -> bool:
        """Whether an axis is stopped by something that could have been pruned."""
        if stop.reason in _NEVER or stop.owned:
            return False
        if stop.node is None:  # nothing sums over it, as where its features have no site
            has_site = any(site.branch == branch and site.kind == "inner" for site in self.program.sites)
            return not has_site and not any(one.name == f"{branch}.inner" for one in self.program.refused)
        if stop.node not in self.flow.dependent and self._is_choice(stop.node):
            return False  # several weights in one tensor, taken apart
        return not (ops.packet(stop.node) in ops.CONVOLUTIONS and axis > 1)

    def stop(self, path: str, axis: int) -> Mismatch:
        """Return why no site cuts an axis, and where (rule 4)."""
        node = self.weights.get(path)
        if node is None:
            return Mismatch(UNREAD)
        labels = np.arange(ops.shape_of(node)[axis], dtype=np.int32)
        found = self._close((node, axis), labels)
        if isinstance(found, Closure):
            found = not_zero(found) or self._summed(found) or _several(found) or self._owned(found) or found
        if isinstance(found, Mismatch):
            return replace(found, reason=self._stopped(found))
        leaves = [self.leaf_of[user.name] for user in self._readers(path) if user.name in self.leaf_of]
        known = {branch.name for branch in self.program.branches if self._has_sites(branch.sites)}
        return Mismatch(UNSUMMED if not leaves or any(leaf.branch in known for leaf in leaves) else SKIPPED)

    def _close(self, seed: Dimension, labels: np.ndarray) -> Closure | Mismatch:
        statistics: Statistics = "none" if self.whole_stream else "full"
        return close([(seed, labels)], self.around, statistics=statistics)

    def _summed(self, closure: Closure) -> Mismatch | None:
        """Return what stops the values that a product sums with the axis; the stream does not."""
        for (value, dim, _), labels in closure.gates.items():
            found = self._close((value, dim), labels)
            if isinstance(found, Mismatch) and not found.stream:
                return found
        return None

    def _has_sites(self, names: tuple[str, ...]) -> bool:
        return any(site.name in names for site in self.program.sites)

    def _owned(self, closure: Closure) -> Mismatch | None:
        """Return a mismatch if a site already cuts some of the positions."""
        paths = {(str(node.target), dim) for node, dim in closure.labels if node.op == "get_attr"}
        for site in self.program.sites:
            if any((piece.parameter, piece.axis) in paths for piece in site.slices):
                return Mismatch(f"the features already belong to {site.name}", owned=True)
        return None

    def _stopped(self, mismatch: Mismatch) -> str:
        """Return the reason of a mismatch; heads have a special reason, unless they are refused by name."""
        node = mismatch.node
        leaf = self.leaf_of.get(node.name) if node is not None else None
        if node is None or leaf is None or self._is_refused(leaf, mismatch.reason):
            return mismatch.reason
        if ops.is_grouped(node) or (self._is_choice(node) and self._chooses(leaf)):
            return EXPERTS
        return HEADS.get(leaf.kind, mismatch.reason) if mismatch.grouped else mismatch.reason

    def _is_choice(self, node: fx.Node) -> bool:
        several = node.args[0] if node.target is operator.getitem else node
        return isinstance(several, fx.Node) and ops.packet(several) in _CHOICES

    def _chooses(self, leaf: Leaf) -> bool:
        return any(ops.packet(self.nodes[name]) is ops.aten.topk for name in leaf.nodes)

    def _is_refused(self, leaf: Leaf, reason: str) -> bool:
        named = f"{leaf.branch}."
        return any(one.name.startswith(named) and one.reason == reason for one in self.program.refused)


def _several(closure: Closure) -> Mismatch | None:
    """Return the operation that sums over the features and another dimension at once."""
    return next(filter(None, (sums_over_several(user) for _, _, user in closure.gates)), None)
