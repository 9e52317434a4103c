"""The features of an attention's values, and everything that is cut with one of them.

    v (B, H, T, F) = value projection (x)       rows of the value projection: H heads of F features
    a = softmax(…) · v          (B, H · n, T, F)
    y = output projection (a)                   its columns: the n queries of a head read the same features

Values meet no rotation and no softmax: the weights of an attention only mix them over time.

Entry points: `close_values` gives what is cut with one feature of every head; `by_head` gives every head its
own features, where they fit.  Rules:
1. A dimension of fixed size that an attention's product takes from the values alone has features.
2. The features may not enter another product of two activations, as where keys are the values, or an
   operation that combines them, as a norm of the values.
3. Heads that the output projection, or a projection multiplied with the result, reads together are one: the
   walk over heads of `dispfx.analysis.attention_heads` says which, among the values that have the features.
4. Every head has its own features if they lie side by side in order, head after head or in a dimension next
   to that of heads, and if gates and parameters only see them head after head.  All heads then keep equally
   many, so that sizes in the graph depend on that number alone.  Otherwise the heads share one selection.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from dispfx.analysis.attention_heads import neighbours_together
from dispfx.analysis.flow import Flow
from dispfx.analysis.label_map import Closure, LabelContext, Mismatch, close
from dispfx.analysis.links import Dimension, Link, links
from dispfx.analysis.token_mixing import weighing
from dispfx.ir import ops
from dispfx.ir.sites import UNTOUCHED


@dataclass(frozen=True)
class ByHead:
    """A closure in which every head has its own features.

    Args:
        heads: number of heads.
        closure: labels count the features of all heads; where heads have a dimension of their own, labels are
            (heads there, positions).
    """

    heads: int
    closure: Closure


def close_values(
    attention: fx.Node, flow: Flow, context: LabelContext
) -> tuple[Dimension, Closure | Mismatch]:
    """Return the dimension of an attention's features, and what is cut with one of every head, or why not."""
    values = _values(attention, flow)
    found = _taken_from(attention, values)
    if values is None or not found:
        reason = f"no dimension of {ops.operation(attention)} is of the values' features alone"
        return (attention, 0), Mismatch(reason, attention)
    seed = (attention, max(found))
    labels = np.arange(ops.shape_of(attention)[seed[1]], dtype=np.int32)
    return seed, close([(seed, labels)], context, apart="values")


def _values(attention: fx.Node, flow: Flow) -> fx.Node | None:
    """Return the operand of an attention's product that is no softmax."""
    if ops.packet(attention) in ops.ATTENTION:
        return ops.operand(attention, 2)
    weights = weighing(attention, flow)
    return next((value for value in ops.operands(attention) if value is not weights), None)


def _taken_from(attention: fx.Node, values: fx.Node | None) -> set[int]:
    """Return the dimensions of the result, of fixed size, that the values alone have (rule 1)."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for link in links(attention) or ():
        if isinstance(link, Link):
            for here, there in ((link.a, link.b), (link.b, link.a)):
                if there[0] is attention and here[0] is not attention and not ops.is_dynamic(*there):
                    found[here[0] is values].add(there[1])
    return found[True] - found[False]


def by_head(seed: Dimension, closure: Closure, flow: Flow, context: LabelContext) -> ByHead | None:
    """Return the closure with features of each head, or None where heads must share them (rule 4)."""
    heads = _heads(seed, closure, flow, context)
    if heads is None:
        return None
    features = closure.features
    labels = {
        dimension: _of_all_heads(own, _heads_at(dimension, closure, heads), features)
        for dimension, own in closure.labels.items()
    }
    gates = {
        edge: _side_by_side(own, heads.gates[edge], features) if edge in heads.gates else None
        for edge, own in closure.gates.items()
    }
    several = {at: own for at, own in labels.items() if own is not None}
    gated = {edge: own for edge, own in gates.items() if own is not None}
    split = any(own.ndim > 1 for (node, _), own in several.items() if node.op == "get_attr")
    if split or len(several) < len(labels) or len(gated) < len(gates):
        return None
    return ByHead(heads.features, Closure(several, gated))


def _heads(seed: Dimension, closure: Closure, flow: Flow, context: LabelContext) -> Closure | None:
    """Return the heads of every value with the features, those that are read together as one (rule 3).

    None where an operation combines heads: what it gives has the features of all of them.
    """
    attention, last = seed
    values = _values(attention, flow)
    shared = {
        there[1]
        for link in links(attention) or ()
        if isinstance(link, Link)
        for here, there in ((link.a, link.b), (link.b, link.a))
        if here[0] is values and there[0] is attention and not ops.is_dynamic(*there)
    } - {last}
    if len(shared) != 1:
        return None
    dim = shared.pop()
    within = {node for node, _ in closure.labels}
    for labels in neighbours_together(ops.shape_of(attention)[dim]):
        found = close(
            [((attention, dim), labels)], context, joins_features=True, apart="heads", within=within
        )
        if isinstance(found, Closure):
            return found if found.gates.keys() <= closure.gates.keys() else None
    return None


def _heads_at(dimension: Dimension, closure: Closure, heads: Closure) -> Mapping[bool, np.ndarray] | None:
    """Return the heads along the dimension itself (True) or along another of the same value (False)."""
    node = dimension[0]
    found = {dim: labels for (value, dim), labels in heads.labels.items() if value is node}
    several = sum(value is node for value, _ in closure.labels) > 1
    if len(found) != 1 or several:
        return None
    dim, labels = found.popitem()
    return {dim == dimension[1]: labels}


def _of_all_heads(own: np.ndarray, at: Mapping[bool, np.ndarray] | None, features: int) -> np.ndarray | None:
    """Return labels of the features of all heads, (positions,) or (heads there, positions)."""
    if at is None:
        return None
    if True in at:
        return _side_by_side(own, at[True], features)
    heads, follows = at[False], own != UNTOUCHED
    if (heads == UNTOUCHED).any() or not _is_in_order(own[follows], features):
        return None
    return np.where(follows, heads[:, None] * features + own, UNTOUCHED).astype(np.int32)


def _side_by_side(own: np.ndarray, heads: np.ndarray, features: int) -> np.ndarray | None:
    """Return labels along a dimension that holds the features of one head after the other."""
    follows = own != UNTOUCHED
    of_runs = heads[follows]
    if (of_runs == UNTOUCHED).any() or not _is_in_order(own[follows], features):
        return None
    if (np.ptp(of_runs.reshape(-1, features), axis=1) > 0).any():
        return None
    return np.where(follows, heads * features + own, UNTOUCHED).astype(np.int32)


def _is_in_order(own: np.ndarray, features: int) -> bool:
    return len(own) % features == 0 and np.array_equal(
        own, np.tile(np.arange(features), len(own) // features)
    )
