"""How much faster a pruned decoder can be at most, from what a step must read and compute.

    bound(prefill) = operations(dense) / operations(pruned)
    bound(decode)  = bytes(dense) / bytes(pruned)

Counted are products with weights (two operations a weight and token), attention, and, in bytes, every
weight once and the keys and values of all tokens so far.  The head, the embedding, the cache and attention
are not pruned, so they are the same on both sides and named by themselves; the norms' and pointwise
operations' own time is left out, which is why a bound is not reached.  Of stacked experts a step reads
those that its tokens can reach.

Shape legend: B batch, T new tokens, P cached tokens.
"""

import math
from dataclasses import dataclass, fields

from torch import fx

from dispfx.estimate.graph_sizes import Sizes
from dispfx.estimate.step_work import operations_of
from dispfx.ir import ops
from dispfx.ir.cached_inputs import CachedShape, bytes_per_token
from dispfx.ir.ops import aten, packet
from dispfx.ir.program import Program


@dataclass(frozen=True)
class StepCost:
    """What one step costs, by part.

    Args:
        layer_operations, head_operations, attention_operations: a multiplication and an addition are two.
        layer_bytes: of the layers' weights.
        head_bytes: of the head, where it reads a token.
        embedding_bytes: of the rows that are looked up.
        cache_bytes: keys and values, read once.
    """

    layer_operations: int = 0
    head_operations: int = 0
    attention_operations: int = 0
    layer_bytes: int = 0
    head_bytes: int = 0
    embedding_bytes: int = 0
    cache_bytes: int = 0

    @property
    def operations(self) -> int:
        """All operations."""
        return self.layer_operations + self.head_operations + self.attention_operations

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.layer_bytes + self.head_bytes + self.embedding_bytes + self.cache_bytes

    def shares(self) -> dict[str, float]:
        """Return the share of each part in the operations, or in the bytes."""
        found = {}
        for entry in fields(self):
            total = self.operations if entry.name.endswith("operations") else self.bytes
            found[entry.name] = getattr(self, entry.name) / total if total else 0.0
        return found


def bound(dense: StepCost, pruned: StepCost, shape: CachedShape) -> float:
    """Return the largest possible speed-up: by bytes for single tokens, else by operations."""
    if shape.tokens == 1:
        return dense.bytes / pruned.bytes
    return dense.operations / pruned.operations


def step_cost(program: Program, shape: CachedShape, *, last_logits: bool = True) -> StepCost:
    """Return what a step of `shape` costs.

    Args:
        program: lowered (by index-add, so that no zero row is counted), with a cache or without.
        last_logits: the head reads one token a sequence.
    """
    sizes = Sizes(program.graph, shape.batch, shape.tokens)
    head = _head_of(program.graph)
    layers = attention = head_operations = 0
    for node in program.graph.nodes:
        if packet(node) in ops.ATTENTION or (ops.is_product(node) and not ops.tensors_read(node)):
            attention += _attention_operations(node, shape, sizes)
        elif node is head:
            head_operations = operations_of(node, sizes) // (shape.tokens if last_logits else 1)
        elif ops.is_product(node):
            layers += operations_of(node, sizes)
    tokens = shape.past + shape.tokens
    cached = bytes_per_token(program.graph)
    tables, weights, last = _weight_bytes(program, head, shape, sizes)
    return StepCost(layers, head_operations, attention, weights, last, tables, shape.batch * tokens * cached)


def _head_of(graph: fx.Graph) -> fx.Node | None:
    """Return the product that gives the logits, before pointwise operations."""
    node = ops.logits_of(graph)
    while ops.is_pointwise(node) or packet(node) in ops.VIEWS | ops.packets("slice"):
        node = ops.operands(node)[0]
    return node if ops.is_product(node) else None


def _attention_operations(node: fx.Node, shape: CachedShape, sizes: Sizes) -> int:
    """Two products of every new token with the tokens before it and itself; all tokens where spelled out."""
    if packet(node) in ops.ATTENTION:
        query, value = node.args[0], node.args[2]
        assert isinstance(query, fx.Node) and isinstance(value, fx.Node)
        batch, heads, _, size = sizes.shape(query)
        pairs = shape.tokens * shape.past + shape.tokens * (shape.tokens + 1) // 2
        return 2 * batch * heads * pairs * (size + sizes.shape(value)[-1])
    traced = _TracedSizes(node.graph)
    pairs = shape.batch * shape.tokens * (shape.past + shape.tokens)
    return operations_of(node, traced) * pairs // traced.pairs


class _TracedSizes(Sizes):
    """The sizes that a graph was traced with, the cached tokens too."""

    def __init__(self, graph: fx.Graph):
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        batch, tokens = ops.shape_of(inputs[0])
        super().__init__(graph, batch, tokens)
        self.pairs = batch * tokens * (ops.shape_of(inputs[1])[1] if len(inputs) > 1 else tokens)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return ops.shape_of(node)


def _weight_bytes(
    program: Program, head: fx.Node | None, shape: CachedShape, sizes: Sizes
) -> tuple[int, int, int]:
    """Return the bytes read of embeddings, of the layers' weights, and of the head."""
    parameters = program.parameters
    last = set(ops.tensors_read(head)) if head is not None else set()
    tables = layers = head_bytes = 0
    for node in program.graph.nodes:
        path = str(node.target) if node.op == "get_attr" else ""
        if path not in parameters:
            continue
        whole = parameters[path].numel() * parameters[path].element_size()
        looked_up = [user for user in node.users if packet(user) is aten.embedding]
        tables += sum(sizes.bytes(user) for user in looked_up)
        if path in last:
            head_bytes += whole
        elif len(looked_up) < len(node.users):
            layers += int(whole * _reached(node, sizes))
    return tables, layers, head_bytes


def _reached(weight: fx.Node, sizes: Sizes) -> float:
    """Return which share of a weight a step can reach: all of it, but of stacked experts some."""
    shape = sizes.shape(weight)
    reached = []
    for user in weight.users:
        if packet(user) in ops.GATHERS:
            reached.append(sizes.count(user) / math.prod(shape))
        elif "grouped_mm" in str(user.target) and len(shape) == 3:
            rows = ops.operand(user, 0)
            reached.append(sizes.shape(rows)[0] / shape[0])
        else:
            return 1.0
    return min(1.0, sum(reached))
