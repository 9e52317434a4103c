"""Write keys and values into buffers of a fixed length, so that a decode step always has one shape.

    k' = cat([past, k], 2)                    c = index_copy_(cache, 2, start + arange(T), k)
    m  = arange(P + T) <= arange(T) + P   →   m = arange(S) <= arange(T) + start
    a  = attention(q, k', v', m)              a = attention(q, c, c', m)
    return logits, k', v'                     return logits

The number P of cached tokens is two things in a cached graph, the size of the cache and the position of
the next token.  Here they part: the caches have S places, and `start`, a tensor, counts those in use.

Rules:
1. Every cache of the program is one `cat` of the input and the new keys or values along the tokens; it
   becomes an `index_copy_`, the only operation in a program that changes its operand.
2. P + T as a size becomes S.  P or P + T in arithmetic with tensors becomes `start` or `start + T`.  Any
   other use of them is refused.
3. The inputs are those of a cached program with `start`, int64 (), after the positions, and an attention
   mask (B, S); the logits are the only output.  Causal masks hide the places that are not in use yet.
4. An attention whose mask is the plain causal one (`dispfx.analysis.causal_mask`) needs no mask in memory.
   With `reads="new"` it reads the new keys alone and is causal: a prefill from an empty cache.  With
   `reads="prefix"` it becomes `dispfx::cached_attention`, which reads the places in use: a decode step.
   Both hold without padding only; `reads="mask"` keeps every mask.
"""

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from dispfx.analysis.causal_mask import is_causal
from dispfx.errors import UnsupportedGraphError
from dispfx.ir import ops
from dispfx.ir.cached_inputs import CACHED_INPUTS
from dispfx.ir.ops import argument, aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program
from dispfx.kernels.cached_attention import CACHED_ATTENTION
from dispfx.words.choices import check_choices

Reads = Literal["mask", "new", "prefix"]
START = "start"

_ARITHMETIC = ops.packets("add sub rsub lt le gt ge eq ne __and__ mul")
_SIZED = ops.packets(
    "expand reshape view arange zeros ones full empty new_zeros new_ones new_full new_empty slice"
)


@dataclass(frozen=True)
class StaticCache:
    """Keep keys and values in place.

    Args:
        length: S, places of every cache.
        reads: what an attention with a causal mask reads.
    """

    length: int
    reads: Reads = "mask"

    def __post_init__(self) -> None:
        """Check what attention reads.

        Raises:
            DispfxError: if `reads` is unknown.
        """
        check_choices(self)

    name = "static-cache"
    requires = "lowered"
    ensures = "static"

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place.

        Raises:
            UnsupportedGraphError: if the program has no cache, or uses it differently.
        """
        writes = _writes(program)
        plain = self._plain_attentions(program)
        start, places = _insert_start(program)
        _part_sizes(program.graph, start)
        new = {}
        for write, (cache, values) in writes.items():
            new[write] = values
            write.target = aten.index_copy_.default
            write.args, write.kwargs = (cache, 2, places, values), {}
            batch, heads, _, size = cache.meta["val"].shape
            cache.meta["val"] = cache.meta["val"].new_empty((batch, heads, self.length, size))
            write.meta["val"] = cache.meta["val"]
        for attention in plain:
            _without_mask(program.graph, attention, self.reads, new, start)
        _return_logits(program)
        program.inputs = (*program.inputs[: len(CACHED_INPUTS)], START, *program.inputs[len(CACHED_INPUTS) :])
        program.rebuild(dict(program.tensors()))
        note = f"{len(writes)} caches of {self.length} places, {len(plain)} attentions without a mask"
        return PassResult(True, note)

    def _plain_attentions(self, program: Program) -> list[fx.Node]:
        if self.reads == "mask":
            return []
        found: dict[fx.Node, bool] = {}
        plain = []
        for node in program.graph.nodes:
            mask = argument(node, 3, "attn_mask") if packet(node) in ops.ATTENTION else None
            if isinstance(mask, fx.Node):
                if mask not in found:
                    found[mask] = is_causal(program, mask, self.length)
                if found[mask]:
                    plain.append(node)
        return plain


def _writes(program: Program) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Return for every present cache the past one and the new keys or values (rule 1)."""
    pairs = [(past, present) for past, twins in program.caches.items() for present in twins]
    pairs = [(past, present) for past, present in pairs if past.op == "placeholder"]
    if not pairs:
        raise UnsupportedGraphError("a static cache needs a program with a cache", where=program.model_class)
    found = {}
    for past, present in pairs:
        parts = present.args[0] if packet(present) is aten.cat else None
        dim = argument(present, 1, "dim", 0)
        if (
            not isinstance(parts, list | tuple)
            or len(parts) != 2
            or parts[0] is not past
            or dim not in (2, -2)
        ):
            raise _refusal(present, "each cache must be the cached tokens followed by the new ones")
        found[present] = (past, parts[1])
    return found


def _refusal(node: fx.Node, what: str) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{what}; found {node.format_node()}",
        where=ops.source_line(node) or node.name,
        hint="run the program with a cache that grows",
    )


def _insert_start(program: Program) -> tuple[fx.Node, fx.Node]:
    """Insert the input `start` and the places (T,) of the new tokens."""
    graph = program.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    ids, last = inputs[0], inputs[len(CACHED_INPUTS) - 1]
    with graph.inserting_after(last):
        start = graph.placeholder(START)
    start.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        tokens = graph.call_function(aten.sym_size.int, (ids, 1))
        tokens.meta["val"] = ids.meta["val"].shape[1]
        offsets = graph.call_function(aten.arange.default, (tokens,), {"device": program.device})
        places = graph.create_node("call_function", aten.add.Tensor, (offsets, start), name="places")
    offsets.meta["val"] = places.meta["val"] = ids.meta["val"].new_empty(ids.meta["val"].shape[1])
    return start, places


def _part_sizes(graph: fx.Graph, start: fx.Node) -> None:
    """Separate the size of the caches from the number of places in use (rule 2)."""
    sizes = [node for node in graph.nodes if _is_length(node)]
    for size in sizes:
        for user in list(size.users):
            if user.target is operator.add:
                _part_total(graph, user, size, start)
            elif _is_arithmetic(user):
                user.replace_input_with(size, start)
            else:
                raise _refusal(user, "the number of cached tokens must be a position or part of a size")


def _is_length(node: fx.Node) -> bool:
    """Whether the node is the number of tokens in a cache that is taken."""
    if packet(node) is not aten.sym_size or node.args[1] != 2:
        return False
    cache = node.args[0]
    return (
        isinstance(cache, fx.Node) and cache.op == "placeholder" and cache.name.startswith("past_key_values_")
    )


def _part_total(graph: fx.Graph, total: fx.Node, size: fx.Node, start: fx.Node) -> None:
    """Rewrite the uses of P + T."""
    (tokens,) = (value for value in total.args if value is not size)
    for user in list(total.users):
        if _is_arithmetic(user):
            with graph.inserting_before(user):
                end = graph.call_function(aten.add.Tensor, (start, tokens))
            end.meta["val"] = start.meta["val"]
            user.replace_input_with(total, end)
        elif packet(user) in _SIZED:
            user.replace_input_with(total, size)
        else:
            raise _refusal(user, "the number of cached and new tokens must be a position or a size")
    graph.erase_node(total)


def _is_arithmetic(user: fx.Node) -> bool:
    return packet(user) in _ARITHMETIC and ops.is_tensor(user)


def _without_mask(
    graph: fx.Graph, attention: fx.Node, reads: Reads, new: dict[fx.Node, fx.Node], start: fx.Node
) -> None:
    """Rewrite an attention whose mask is causal (rule 4)."""
    query, key, value = (argument(attention, place, "") for place in range(3))
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    if key not in new or value not in new:
        return
    scale = attention.kwargs.get("scale")
    if reads == "prefix":
        attention.target = CACHED_ATTENTION
        attention.args, attention.kwargs = (query, key, value, start), {"scale": scale}
        return
    shared = {name: flag for name, flag in attention.kwargs.items() if name == "enable_gqa"}
    attention.args = (query, new[key], new[value])
    attention.kwargs = {"is_causal": True, "scale": scale, **shared}


def _return_logits(program: Program) -> None:
    output = program.graph.output_node()
    output.args = (ops.logits_of(program.graph),)
    program.outputs = program.outputs[:1]
