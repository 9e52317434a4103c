"""About how much memory a step of learning takes in addition to the weights, from the sizes of a gated graph.

    step = kept for the backward pass + the larger of the loss and the gradients that live at once

1. An operation keeps the activations that it reads if its result needs a gradient.  Sums, casts, lookups and
   changes of shape keep nothing.  A product keeps an operand only if another operand needs a gradient, so
   nothing where an activation meets a frozen weight.  Attention keeps its result as well, and functions such
   as exp keep their result alone.
2. The loss holds three float32 numbers per logit, of all rows, or of one chunk of them
   (`dispfx.fast_decoder.head_loss`) and then the stream and its gradient.
3. Gradients: about three values of the largest size within a layer live at once.
4. With checkpoints every layer keeps the stream that enters it, and one layer at a time keeps the rest.
5. A compiled layer keeps about half of what its operations keep one by one.

Memory that allocators hold between blocks is added by `dispfx.estimate.run_estimate`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from dispfx.estimate.graph_sizes import Sizes, storage
from dispfx.fast_decoder.head_loss import chunk_rows
from dispfx.ir import ops
from dispfx.ir.ops import packet, packets
from dispfx.learning.divergence import even_rows

_KEEP_NOTHING = (
    ops.CASTS
    | ops.COPIES
    | ops.SHAPE_OPS
    | ops.AVERAGES
    | ops.GATHERS
    | packets("add sub neg roll flip embedding masked_fill where pad constant_pad_nd cumsum one_hot new_ones")
    | packets("index_add index_put scatter_add gather lift_fresh")
)
_PRODUCTS = ops.PRODUCTS | packets("mul multiply div true_divide addcmul _grouped_mm")
_KEEP_RESULT = packets("relu relu6 tanh sigmoid exp expm1 sqrt rsqrt reciprocal log_softmax") | ops.SOFTMAX
_FLOAT_BYTES = 4
_FLOATS_PER_LOGIT = 3
_LIVE_GRADIENTS = 3
_KEPT_BY_COMPILED = 0.5


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward pass, without the weights.

    Args:
        kept: what autograd holds between the two.
        loss: what the loss takes in addition.
        gradients: what the gradients that live at once take in addition.
        streams: what enters all layers together; 0 where the layers are not known.
        layers: how many.
    """

    kept: int
    loss: int
    gradients: int
    streams: int = 0
    layers: int = 1

    def bytes(self, *, checkpoints: bool = False, compiled: bool = False) -> int:
        """Return the largest sum at any time."""
        kept = int(self.kept * (_KEPT_BY_COMPILED if compiled else 1.0))
        if checkpoints:
            return self.streams + max(self.loss, kept // self.layers + self.gradients)
        return kept + max(self.loss, self.gradients)


def step_memory(
    graph: fx.Graph,
    needs: frozenset[fx.Node],
    sizes: Sizes,
    *,
    stream: fx.Node | None = None,
    layers: int = 1,
    in_chunks: bool = False,
) -> StepMemory:
    """Return the memory of one step.

    Args:
        graph: gated.
        needs: its values that need a gradient, as `needing_gradients` finds them.
        sizes: of the graph at the batch and length of a step.
        stream: the value between the last layer and the head, where the layers are known.
        layers: that checkpoints tell apart.
        in_chunks: whether the loss is computed in chunks of rows of the stream.
    """
    head = set() if stream is None else _depending_on(stream)
    body = [node for node in graph.nodes if node not in head]
    width = 0 if stream is None else sizes.bytes(stream)
    logits = ops.logits_of(graph)
    rows = sizes.batch * sizes.tokens
    if in_chunks:
        rows = even_rows(rows, chunk_rows(sizes.shape(logits)[-1]))
    per_logit = _FLOATS_PER_LOGIT * _FLOAT_BYTES + logits.meta["val"].element_size()
    loss = rows * sizes.shape(logits)[-1] * per_logit + 2 * width
    largest = max(sizes.bytes(node) for node in body if node in needs)
    kept = _kept_bytes(body, needs, sizes)
    return StepMemory(kept, loss, _LIVE_GRADIENTS * largest, layers * width, layers)


def needing_gradients(graph: fx.Graph, leaves: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the leaves, such as masks, and every value that a gradient reaches them through."""
    needs = set(leaves)
    for node in graph.nodes:
        value = node.meta.get("val")
        whole = isinstance(value, Tensor) and not value.is_floating_point()
        if not whole and any(operand in needs for operand in ops.operands(node)):
            needs.add(node)
    return frozenset(needs)


def _depending_on(stream: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in stream.graph.nodes:
        if any(operand is stream or operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def _kept_bytes(nodes: Sequence[fx.Node], needs: frozenset[fx.Node], sizes: Sizes) -> int:
    """Return the bytes of all that is kept, memory that several values share counted once (rule 1)."""
    weights = {storage(node) for node in nodes if node.op == "get_attr"}
    owner: dict[object, fx.Node] = {}
    for node in nodes:
        owner.setdefault(storage(node), node)
    kept = {storage(value) for node in nodes if node in needs for value in _kept_by(node, needs)}
    return sum(sizes.bytes(owner[key]) for key in kept.intersection(owner) - weights)


def _kept_by(node: fx.Node, needs: frozenset[fx.Node]) -> list[fx.Node]:
    operands = [value for value in ops.operands(node) if ops.is_tensor(value)]
    if ops.is_gate(node) or packet(node) in ops.NORMS:
        return operands[:1]
    if node.op != "call_function" or packet(node) in _KEEP_NOTHING:
        return []
    if packet(node) in _PRODUCTS:
        return [value for value in operands if needs.intersection(_others(node, value))]
    if packet(node) in _KEEP_RESULT:
        return [node]
    return [*operands, node] if packet(node) in ops.ATTENTION else operands


def _others(node: fx.Node, value: fx.Node) -> list[fx.Node]:
    """Return the operands that a product multiplies `value` with; itself among them in `x · x`."""
    twice = [value] if node.args.count(value) > 1 else []
    return twice + [other for other in ops.operands(node) if other is not value]
