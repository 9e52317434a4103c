"""The key/value heads of an attention, and everything that is cut with one of them.

    v (B, H, T, F) ─┐
    a = softmax(…) · v          (B, H · n, T, F)          head i of the result reads key/value head i // n
    y = output projection (a)

Entry point: `close_heads`.  Rules:
1. A product that mixes tokens and keeps a dimension of fixed size of both operands apart has heads there.
2. Neighbouring heads that share keys and values, as grouped queries do, are one feature: of all numbers of
   features that divide the number of heads, the largest whose labels fit counts.  So are heads that meet.
3. An attention whose heads all share one key or value has no such features.
4. Labels of every factor lead to a product that makes it; otherwise queries alone have heads (rule 3).
5. A product of two activations keeps heads apart; one that sums over them refuses the site, and so does any
   other operation that mixes them.
"""

from collections.abc import Collection, Iterator

import numpy as np
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.label_map import Closure, LabelContext, Mismatch, close
from dispfx.analysis.links import Dimension, Link, links
from dispfx.analysis.token_mixing import behind_softmax
from dispfx.ir import ops


def attentions(nodes: Collection[fx.Node], flow: Flow) -> Iterator[fx.Node]:
    """Yield the products of attention weights and values among some nodes, in the order of the graph."""
    for node in sorted(nodes, key=flow.order.__getitem__):
        between = ops.is_product(node) and len(ops.activations(node, flow.dependent)) > 1
        if ops.packet(node) in ops.ATTENTION or (between and behind_softmax(node, flow)):
            yield node


def close_heads(
    attention: fx.Node, flow: Flow, context: LabelContext
) -> tuple[Dimension, Closure | Mismatch] | None:
    """Return the dimension of an attention's heads, and what is cut with them or why they cannot be cut.

    None where one head, or one key or value for all heads, leaves nothing to choose (rule 3).
    """
    dims = _kept_apart(attention)
    shared = set.intersection(*dims)
    if not shared and set.union(*dims) - {ops.rank(attention) - 1}:
        return None  # Queries alone have heads.
    if not shared:
        reason = (
            "no dimension of the attention is of heads alone: they share one with sequences, or are separate"
        )
        return (attention, 0), Mismatch(reason, attention)
    dim = max(shared)
    heads = ops.shape_of(attention)[dim]
    refused = None
    for features in (number for number in range(heads, 1, -1) if heads % number == 0):
        labels = (np.arange(heads) // (heads // features)).astype(np.int32)
        found = close([((attention, dim), labels)], context, joins_features=True, of_heads=True)
        if isinstance(found, Closure):
            return ((attention, dim), found) if _cuts_every_operand(attention, found, flow) else None
        if refused is None or not found.grouped:
            refused = found
    return None if refused is None else ((attention, dim), refused)


def _kept_apart(attention: fx.Node) -> list[set[int]]:
    """Return for every factor the dimensions of the result that it keeps apart, of fixed size (rule 1)."""
    linked: dict[fx.Node, set[int]] = {factor: set() for factor in _factors(attention)}
    for link in links(attention) or ():
        if isinstance(link, Link):
            for here, there in ((link.a, link.b), (link.b, link.a)):
                if there[0] is attention and here[0] in linked and not ops.is_dynamic(*there):
                    linked[here[0]].add(there[1])
    return list(linked.values())


def _factors(attention: fx.Node) -> list[fx.Node]:
    """Return queries, keys and values, or attention weights and values."""
    values = ops.operands(attention)
    return values[:3] if ops.packet(attention) in ops.ATTENTION else values


def _cuts_every_operand(attention: fx.Node, closure: Closure, flow: Flow) -> bool:
    """Whether heads of queries, keys and values go together: a shared key or value would stay (rule 4)."""
    labelled = {node for node, _ in closure.labels}

    def stops(node: fx.Node) -> bool:
        return ops.is_product(node) or (node not in labelled and ops.is_tensor(node))

    def made_of_labelled(operand: fx.Node) -> bool:
        _, met = flow.cone(operand, stop=stops)
        return any(ops.is_product(node) for node in met & labelled)

    return all(made_of_labelled(factor) for factor in _factors(attention) if factor in flow.dependent)
