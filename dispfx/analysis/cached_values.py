"""The keys and values that a decoder keeps for each token, read from its graph without a cache.

    k (B, G, T, F) → repeated to (B, H, T, F) ─┐
    v (B, G, T, F) → repeated to (B, H, T, F) ─┴ attention          G · F numbers per token of k, and of v

Entry point: `cache_size`.  Rules:
1. Every attention keeps its keys and its values, as they are before views, casts and repetitions: the
   smallest value on that way counts.
2. Attentions that read the same keys, or the same values, keep them once, as layers that share a cache do.
3. Positions that a site of heads labels follow its features; all others stay.
4. Keys and values are counted for every token: a sliding window that forgets tokens keeps fewer.
5. An attention whose keys or values cannot be told, or have no fixed size per token, makes the size unknown.
6. So does one whose keys or values two weights make from the stream in a row (a latent): a decoder may keep
   what is between them.

A cache of another form, such as the state of a recurrence, has no size per token and does not count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np
from torch import fx

from dispfx.analysis.attention_heads import attentions
from dispfx.analysis.flow import Flow
from dispfx.ir import ops
from dispfx.ir.cache_size import CacheSize
from dispfx.ir.program import Program
from dispfx.ir.sites import UNTOUCHED

# What moves or repeats numbers, and computes none.
_MOVES = (
    ops.VIEWS
    | ops.CASTS
    | ops.COPIES
    | ops.packets(
        "transpose permute t expand movedim swapaxes numpy_T mT repeat tile repeat_interleave broadcast_to"
    )
)
_NONE: Mapping[tuple[str, int], np.ndarray] = {}


def cache_size(program: Program) -> CacheSize:
    """Return the bytes that each token takes in the cache, of a canonical program whose sites are known."""
    flow, nodes = Flow.of(program.graph), program.nodes
    stream = (
        frozenset() if program.stream is None else frozenset(nodes[name] for name in program.stream.values)
    )
    latent = ""
    found: dict[tuple[str, fx.Node], fx.Node] = {}
    for leaf in program.leaves:
        for attention in attentions([nodes[name] for name in leaf.nodes], flow):
            pair = _keys_and_values(attention, flow)
            if pair is None:
                return CacheSize(
                    unknown=f"the keys of {ops.operation(attention)} in {leaf.branch} are not known"
                )
            for role, value in zip(("keys", "values"), pair, strict=True):
                way = list(_way_back(value, flow))
                found[role, way[-1]] = min(way, key=lambda node: prod(ops.shape_of(node)))
                if _is_of_latent(value, flow, stream):
                    latent = f"the {role} in {leaf.branch} are made of a latent, which may be what is cached"
    return replace(_summed(program, found), unknown=latent) if latent else _summed(program, found)


def _summed(program: Program, found: Mapping[tuple[str, fx.Node], fx.Node]) -> CacheSize:
    ids = next(node for node in program.graph.nodes if node.op == "placeholder")
    tokens = prod(ops.shape_of(ids))
    heads = [site for site in program.sites if site.kind == "heads"]
    by_site = {site.name: np.zeros(site.size, dtype=np.int64) for site in heads}
    fixed = 0
    for (role, _), value in found.items():
        each, rest = divmod(prod(ops.shape_of(value)), tokens)
        if rest:
            return CacheSize(unknown=f"the {role} {value.name} have no fixed size per token")
        each *= value.meta["val"].dtype.itemsize
        site, labels = _labels(program, value)
        if site is None or labels is None:
            fixed += each
            continue
        position = each // len(labels)
        own = np.bincount(labels[labels != UNTOUCHED], minlength=len(by_site[site])) * position
        by_site[site] += own
        fixed += each - int(own.sum())
    return CacheSize(fixed, {name: tuple(own.tolist()) for name, own in by_site.items()})


def _labels(program: Program, value: fx.Node) -> tuple[str | None, np.ndarray | None]:
    """Return the site of heads that a value follows, and the feature of each position of its dimension."""
    for site in program.sites:
        labelled = program.closures.get(site.name, _NONE) if site.kind == "heads" else _NONE
        for dim in range(ops.rank(value)):
            if (value.name, dim) in labelled:
                return site.name, labelled[value.name, dim]
    return None, None


def _keys_and_values(attention: fx.Node, flow: Flow) -> tuple[fx.Node, fx.Node] | None:
    """Return the keys and the values of an attention, or of a product of attention weights and values."""
    if ops.packet(attention) in ops.ATTENTION:
        pair = (ops.argument(attention, place, name) for place, name in ((1, "key"), (2, "value")))
        keys, values = (value for value in pair if isinstance(value, fx.Node))
        return keys, values
    activations = ops.activations(attention, flow.dependent)
    values = [value for value in activations if not _is_of_pairs(value, flow)]
    weights = [value for value in activations if _is_of_pairs(value, flow)]
    product = _product_of_scores(weights[0], flow) if len(values) == len(weights) == 1 else None
    if product is None:
        return None
    queries, keys = ops.activations(product, flow.dependent)
    # Grouped queries have fewer keys than queries; otherwise both are as large, and keys come second.
    return min((keys, queries), key=lambda value: _smallest(value, flow)), values[0]


def _is_of_latent(value: fx.Node, flow: Flow, stream: frozenset[fx.Node]) -> bool:
    """Whether a value is a product with a weight of what is such a product already, after the stream."""

    def products(of: fx.Node) -> set[fx.Node]:
        met = flow.cone(of, stop=lambda node: node in stream or ops.is_product(node))[1]
        return {node for node in met - stream if len(ops.activations(node, flow.dependent)) == 1}

    return any(products(ops.activations(first, flow.dependent)[0]) for first in products(value))


def _smallest(value: fx.Node, flow: Flow) -> int:
    return min(prod(ops.shape_of(node)) for node in _way_back(value, flow))


def _is_of_pairs(value: fx.Node, flow: Flow) -> bool:
    """Whether a value has a number for each pair of tokens."""
    ids = next(node for node in flow.order if node.op == "placeholder")
    return ops.shape_of(value).count(ops.shape_of(ids)[-1]) > 1


def _product_of_scores(weights: fx.Node, flow: Flow) -> fx.Node | None:
    """Return the first product of two activations that attention weights are computed from."""
    pending, met = [weights], set[fx.Node]()
    while pending:
        _, stops = flow.cone(pending.pop(), stop=ops.is_product)
        for product in stops:
            activations = ops.activations(product, flow.dependent)
            if len(activations) == 2 and not any(_is_of_pairs(one, flow) for one in activations):
                met.add(product)
            pending += [one for one in activations if _is_of_pairs(one, flow)]
    return min(met, key=flow.order.__getitem__, default=None)


def _way_back(value: fx.Node, flow: Flow) -> Iterator[fx.Node]:
    """Yield a value and those that it is a view, a cast or a repetition of, the nearest first."""
    yield value
    while ops.packet(value) in _MOVES:
        value = ops.operand(value, 0)
        if value not in flow.dependent:
            return
        yield value
