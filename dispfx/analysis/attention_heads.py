"""The key/value heads of an attention, and everything that is cut with one of them.

    v (B, H, T, F) ─┐
    a = softmax(…) · v          (B, H · n, T, F)          head i of the result reads key/value head i // n
    y = output projection (a)

Entry point: `close_heads`.  Rules:
1. A product that mixes tokens and keeps a dimension of fixed size of both operands apart has heads there.
2. Neighbouring heads that share keys and values, as grouped queries do, are one feature: of all numbers of
   features that divide the number of heads, the largest whose labels fit counts.  So are heads that meet.
3. An attention whose heads all share one key or value is refused: no head of the cache could go.
4. Labels of every factor lead to a product that makes it; otherwise queries alone have heads (rule 3).
5. A product of two activations keeps heads apart; one that sums over them refuses the site, and so does any
   other operation that mixes them.
6. A branch that combines tokens without such a product is refused (`why_none`), and so are heads that share a
   dimension with sequences.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.label_map import Closure, LabelContext, Mismatch, close
from dispfx.analysis.links import Dimension, Link, links
from dispfx.analysis.token_mixing import behind_softmax, sums_over_tokens
from dispfx.ir import ops


def attentions(nodes: Collection[fx.Node], flow: Flow) -> Iterator[fx.Node]:
    """Yield the products of attention weights and values among some nodes, in the order of the graph."""
    for node in sorted(nodes, key=flow.order.__getitem__):
        between = ops.is_product(node) and len(ops.activations(node, flow.dependent)) > 1
        if ops.packet(node) in ops.ATTENTION or (between and behind_softmax(node, flow)):
            yield node


def why_none(nodes: Collection[fx.Node], flow: Flow) -> Mismatch | None:
    """Return why nodes that combine tokens hold no attention; None if no product combines them (rule 6)."""
    combining = [node for node in nodes if sums_over_tokens(node, flow)]
    if not combining:
        return None
    first = min(combining, key=flow.order.__getitem__)
    below = {one for value in flow.inputs(first) for one in flow.cone(value, stop=ops.is_product)[1]}
    for product in sorted(filter(ops.is_product, below), key=flow.order.__getitem__):
        if behind_softmax(product, flow):
            reason = f"{ops.operation(product)} mixes the heads between softmax and values"
            return Mismatch(reason, product)
    return Mismatch(f"{ops.operation(first)} combines tokens with weights that are no softmax", first)


def close_heads(
    attention: fx.Node, flow: Flow, context: LabelContext
) -> tuple[Dimension, Closure | Mismatch]:
    """Return the dimension of an attention's heads, and what is cut with them or why they cannot be cut."""
    dims = _kept_apart(attention)
    shared = set.intersection(*dims)
    if not shared:
        queries_alone = bool(set.union(*dims) - {ops.rank(attention) - 1})
        return (attention, 0), _one_key(attention) if queries_alone else _no_dimension(attention)
    dim = max(shared)
    heads = ops.shape_of(attention)[dim]
    refused = None
    for labels in neighbours_together(heads):
        found = close([((attention, dim), labels)], context, joins_features=True, apart="heads")
        if isinstance(found, Closure):
            whole = _cuts_every_operand(attention, found, flow)
            return (attention, dim), found if whole else _one_key(attention)
        if refused is None or not found.grouped:
            refused = found
    assert refused is not None, "a dimension of one head is never linked"
    return (attention, dim), refused


def neighbours_together(heads: int) -> Iterator[np.ndarray]:
    """Yield labels of heads in which neighbours are one, from each by itself to two features (rule 2)."""
    for features in (number for number in range(heads, 1, -1) if heads % number == 0):
        yield (np.arange(heads) // (heads // features)).astype(np.int32)


def _one_key(attention: fx.Node) -> Mismatch:
    """All heads would lose what they read with the first one (rule 3)."""
    reason = f"all heads of {ops.operation(attention)} read one key or one value"
    return Mismatch(reason, attention)


def _no_dimension(attention: fx.Node) -> Mismatch:
    name = ops.operation(attention)
    for dim, size in enumerate(attention.meta["val"].shape):
        expression: Any = size.node.expr if isinstance(size, torch.SymInt) else None
        # A multiple of the number of sequences, as 6·B is.
        if expression is not None and expression.as_coeff_Mul()[0] > 1:
            return Mismatch(f"dimension {dim} of {name} holds heads and sequences together", attention)
    return Mismatch(f"no dimension of {name} is of heads: it has one, or each is computed alone", attention)


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
