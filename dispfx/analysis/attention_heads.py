"""The key/value heads of an attention, and everything that is cut with one of them.

    v (B, H, T, F) ─┐
    a = softmax(…) · v          (B, H · n, T, F)          head i of the result reads key/value head i // n
    y = output projection (a)

Entry point: `close_heads`.  Rules:
1. A product that mixes tokens and keeps a dimension of fixed size of both operands apart has heads there.
2. Neighbouring heads that share keys and values, as grouped queries do, are one feature: of all numbers of
   features that divide the number of heads, the largest whose labels fit counts.  So are heads that meet.
3. An attention whose heads all share one key or value has no such features.
4. A product of two activations keeps heads apart; one that sums over them refuses the site, and so does any
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

    None where one head, or one key and value for all heads, leaves nothing to choose (rule 3).
    """
    dim = _heads_of(attention)
    if dim is None:
        if ops.rank(attention) > 3:
            return None
        return (attention, 0), Mismatch("heads and sequences share one dimension", attention)
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


def _heads_of(attention: fx.Node) -> int | None:
    """Return the dimension of the result that holds heads, next to the tokens (rule 1)."""
    linked: dict[fx.Node, set[int]] = {factor: set() for factor in _factors(attention)}
    for link in links(attention) or ():
        if isinstance(link, Link):
            for here, there in ((link.a, link.b), (link.b, link.a)):
                if there[0] is attention and here[0] in linked and not ops.is_dynamic(*there):
                    linked[here[0]].add(there[1])
    found = sorted(set.intersection(*linked.values()) - {0, ops.rank(attention) - 1})
    return found[-1] if found else None


def _factors(attention: fx.Node) -> list[fx.Node]:
    """Return queries, keys and values, or attention weights and values."""
    values = ops.operands(attention)
    return values[:3] if ops.packet(attention) in ops.ATTENTION else values


def _cuts_every_operand(attention: fx.Node, closure: Closure, flow: Flow) -> bool:
    """Whether heads of queries, keys and values go together: a shared key or value would stay (rule 3)."""
    labelled = {node for node, _ in closure.labels}
    products = {node for node in labelled if ops.is_product(node)}

    def made_of_labelled(operand: fx.Node) -> bool:
        _, met = flow.cone(operand, stop=lambda node: ops.contracts(node) and node is not operand)
        return operand in products or bool(met & products)

    factors = (
        ops.operands(attention)[:3] if ops.packet(attention) in ops.ATTENTION else ops.operands(attention)
    )
    return all(made_of_labelled(factor) for factor in factors if factor in flow.dependent)
