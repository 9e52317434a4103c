"""How much memory one step of learning takes beside the weights: a gated graph walked forth and back.

1. Forward: a value lives until its last user has run, as in the graph's own code, or until its
   backward pass where autograd keeps it (`dispfx.estimate.autograd_memory`).  Values that share memory
   are counted once.
2. Loss of whole logits: they become float32 and a log-softmax of them is kept; on the way back that, its
   gradient and the gradient of the logits live together, three float32 numbers a logit.  Loss in chunks
   (`dispfx.fast_decoder.head_loss`): the logits, float32 copies and a mask of one chunk of rows live
   together, nothing of the chunk before, and a gradient of the shape of the stream is kept instead of what
   the head would keep.
3. Backward: the gradient of a value lives from its first user's turn to its own.  Additions and views
   hand on the gradient that they got; what reaches a value from two users is added up.  What an
   operation kept is released after its turn.

4. On a GPU (`Sizes.on_gpu`) every tensor is a block of its allocator (`dispfx.estimate.cuda_memory`).  In
   half precision an attention's backward pass adds up the gradient of the query in float32, and before it
   one number a row (`mha_bwd` in flash_attn/flash_api.cpp: `dq_accum`, `softmax_d`; as much is in the
   workspace that cuDNN asks for in native/cudnn/MHA.cpp, and in `_efficient_attention_backward`).

Not counted: what other kernels need inside, and what an allocator holds free between blocks.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from dispfx.estimate.autograd_memory import GROUPED, KeptMemory
from dispfx.estimate.graph_sizes import Sizes, storage
from dispfx.fast_decoder.head_loss import chunk_rows, even_rows
from dispfx.ir import ops
from dispfx.ir.ops import aten, packet

_FLOAT_BYTES = 4
# Of a chunk's logits: the exponentials, the targets as numbers, and the difference of the two.
_FLOATS_OF_A_CHUNK = 3
_HANDING_ON = ops.packets("add sub")


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one forward and backward pass, without the weights.

    Args:
        kept: what autograd holds between the two.
        loss: what the loss holds beside that at its largest.
        peak: the largest sum at any time.
    """

    kept: int
    loss: int
    peak: int


def step_memory(
    graph: fx.Graph, needs: frozenset[fx.Node], sizes: Sizes, chunked_from: fx.Node | None = None
) -> StepMemory:
    """Return the memory of one step.

    Args:
        graph: gated.
        needs: its values that need a gradient, as `needing_gradients` finds them.
        sizes: of the graph at the batch and length of a step.
        chunked_from: the stream as the head takes it, where the loss is computed in chunks behind it.
    """
    head = _behind(chunked_from)
    body = [node for node in graph.nodes if node not in head]
    kept = KeptMemory(body, needs, sizes)
    forward = _forward_peak(body, kept, sizes)
    if chunked_from is None:
        end = ops.logits_of(graph)
        loss, first = _loss_bytes(end, sizes), sizes.bytes(end)
    else:
        end = chunked_from
        loss, first = _chunked_loss_bytes(graph, end, head, needs, sizes), 2 * sizes.bytes(end)
    backward = _backward_peak(body, end, first, needs, kept, sizes)
    return StepMemory(kept.total, loss, max(forward, kept.total + loss, backward))


def _behind(stream: fx.Node | None) -> set[fx.Node]:
    """Return what depends on the stream as the head takes it."""
    found: set[fx.Node] = set()
    pending = [] if stream is None else list(stream.users)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.users
    return found


def needing_gradients(graph: fx.Graph, leaves: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the leaves, such as masks, and every value that a gradient reaches them through."""
    needs = set(leaves)
    for node in graph.nodes:
        value = node.meta.get("val")
        whole = isinstance(value, Tensor) and not value.is_floating_point()
        if not whole and any(operand in needs for operand in ops.operands(node)):
            needs.add(node)
    return frozenset(needs)


def _forward_peak(nodes: Sequence[fx.Node], kept: KeptMemory, sizes: Sizes) -> int:
    """Return the largest sum of values alive while the nodes run."""
    last: dict[object, int] = {}
    position = {node: index for index, node in enumerate(nodes)}
    for node in nodes:
        users = [position.get(user, len(nodes) - 1) for user in node.users]
        last[storage(node)] = max([last.get(storage(node), 0), position[node], *users])
    ends: dict[int, list[object]] = {}
    for key, index in last.items():
        ends.setdefault(index, []).append(key)
    alive: dict[object, int] = {}
    seen: set[object] = {storage(node) for node in nodes if node.op in ("get_attr", "placeholder")}
    now = peak = 0
    for index, node in enumerate(nodes):
        key = storage(node)
        if key not in seen:
            seen.add(key)
            alive[key] = sizes.bytes(node)
            now += alive[key]
        now += kept.bytes_of.get((node, "further"), 0)
        peak = max(peak, now)
        for ended in ends.get(index, ()):
            if ended not in kept.bytes_of:
                now -= alive.pop(ended, 0)
    return peak


def _loss_bytes(logits: fx.Node, sizes: Sizes) -> int:
    count, width = sizes.count(logits), logits.meta["val"].element_size()
    # The last token is cut off, which copies where there are several sequences.
    forward = width * (2 if sizes.batch > 1 else 1) + (_FLOAT_BYTES if width != _FLOAT_BYTES else 0)
    return count * max(forward + _FLOAT_BYTES, 3 * _FLOAT_BYTES)


def _chunked_loss_bytes(
    graph: fx.Graph, stream: fx.Node, head: set[fx.Node], needs: frozenset[fx.Node], sizes: Sizes
) -> int:
    """Return the stream, its gradient, and what one chunk of rows takes in its loss or on the way back."""
    logits = ops.logits_of(graph)
    chunk = even_rows(sizes.batch * sizes.tokens, chunk_rows(sizes.shape(logits)[-1]))
    part = Sizes(graph, 1, chunk, on_gpu=sizes.on_gpu)
    inside = [node for node in graph.nodes if node.op == "get_attr" or node is stream or node in head]
    of_head = KeptMemory(inside, needs, part)
    given = of_head.bytes_of.get(storage(stream), 0)
    width = logits.meta["val"].element_size()
    floats = _FLOATS_OF_A_CHUNK + (width != _FLOAT_BYTES)
    half, mask, wide = (part.taken(part.count(logits) * size) for size in (width, 1, _FLOAT_BYTES))
    in_loss = half + mask + floats * wide + of_head.total
    on_way_back = half + _backward_peak(inside, logits, half, needs, of_head, part)
    return 2 * sizes.bytes(stream) + max(in_loss, on_way_back) - given


class _Gradients:
    """The gradients that wait for their value's turn; several values may wait for one and the same."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._of: dict[fx.Node, int] = {}
        self._bytes: list[int] = []
        self._waiting: Counter[int] = Counter()

    def new(self, node: fx.Node, size: int) -> None:
        """Give a value a gradient of its own."""
        self._bytes.append(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.share(node, len(self._bytes) - 1)

    def share(self, node: fx.Node, gradient: int) -> None:
        """Give a value a gradient that is there; what it got before is added to it."""
        before = self._of.pop(node, None)
        self._waiting[gradient] += 1
        self._of[node] = gradient
        if before is None:
            return
        size = max(self._bytes[before], self._bytes[gradient])
        del self._of[node]
        self._bytes.append(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        self._of[node] = len(self._bytes) - 1
        self._waiting[self._of[node]] += 1
        self.release(before)
        self.release(gradient)

    def take(self, node: fx.Node) -> int | None:
        """Return the gradient of a value whose turn it is; it is to be released afterwards."""
        return self._of.pop(node, None)

    def release(self, gradient: int) -> None:
        """End one wait for a gradient; it is freed with the last."""
        self._waiting[gradient] -= 1
        if not self._waiting[gradient]:
            self.now -= self._bytes[gradient]


def _backward_peak(
    nodes: Sequence[fx.Node],
    end: fx.Node,
    first: int,
    needs: frozenset[fx.Node],
    kept: KeptMemory,
    sizes: Sizes,
) -> int:
    """Return the largest sum of kept values and gradients, beginning with `first` bytes at `end`."""
    gradients = _Gradients()
    gradients.now = kept.total
    gradients.new(end, first)
    for node in reversed(nodes):
        gradient = gradients.take(node)
        if gradient is None:
            continue
        operands = [operand for operand in dict.fromkeys(ops.operands(node)) if operand in needs]
        given = sum(sizes.bytes(operand) for operand in operands if not _hands_on(node, operand, sizes))
        gradients.peak = max(gradients.peak, gradients.now + given + _inside(node, sizes))
        for operand in operands:
            if _hands_on(node, operand, sizes):
                gradients.share(operand, gradient)
            else:
                gradients.new(operand, sizes.bytes(operand))
        gradients.release(gradient)
        gradients.now -= sum(kept.bytes_of[key] for key in kept.released_by.get(node, ()))
    return gradients.peak


def _hands_on(node: fx.Node, operand: fx.Node, sizes: Sizes) -> bool:
    """Whether the operand's gradient is the node's, seen in another shape."""
    if not ops.is_tensor(node) or sizes.bytes(node) != sizes.bytes(operand):
        return False
    return packet(node) in _HANDING_ON or (not ops.is_gate(node) and storage(node) == storage(operand))


def _inside(node: fx.Node, sizes: Sizes) -> int:
    """Return what the backward pass of an operation holds beside the gradients that it returns."""
    if ops.is_gate(node):
        return sizes.bytes(node)  # gradient · operand, before it is summed for the mask
    if sizes.on_gpu and packet(node) in ops.ATTENTION:
        return _inside_attention(node, sizes)
    if ops.is_grouped(node) and packet(node) not in GROUPED:
        return sizes.bytes(ops.operands(node)[1])  # it computes the gradient of the weights too
    return 2 * sizes.bytes(node) if packet(node) is aten.pow else 0


def _inside_attention(node: fx.Node, sizes: Sizes) -> int:
    query = ops.operands(node)[0]
    of_rows = _FLOAT_BYTES * math.prod(sizes.shape(query)[:-1])
    half = query.meta["val"].element_size() < _FLOAT_BYTES
    return sizes.taken(of_rows) + (sizes.taken(_FLOAT_BYTES * sizes.count(query)) if half else 0)
