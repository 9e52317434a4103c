"""The context of a decoder, from the positions that it looks up in its position tables.

The index of a position depends on the length of the text but not on its tokens, so it can be computed without
running the decoder.  Rotary positions are computed and need no table.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.errors import DataError
from dispfx.ir import ops
from dispfx.ir.program import Program
from dispfx.words.option_names import option

_GATHERS = ops.packets("embedding index index_select")
_SLICES = ops.packets("slice narrow")


@dataclass(frozen=True)
class _Lookup:
    """A tensor of the decoder's own that is read at places which depend on no token.

    Args:
        table: the tensor.
        dim: of its places.
        places: a tensor of them, or the end of a slice.
    """

    table: fx.Node
    dim: int
    places: fx.Node


def longest_text(program: Program, most: int) -> int:
    """Return the maximum number of tokens, at most `most`, that the position tables allow."""
    lookups = list(_lookups(program))
    if not lookups:
        return most
    return bisect_right(range(1, most + 1), False, key=lambda tokens: bool(_ended(program, lookups, tokens)))


def require_readable(program: Program, tokens: int) -> None:
    """Require that the graph holds for a text, and that every position table is long enough.

    Raises:
        DataError: with the table, and the longest text that it allows.
        CaptureError: if the decoder's arithmetic changes before that.
    """
    ended = _ended(program, list(_lookups(program)), tokens)
    if ended is not None:
        longest = longest_text(program, tokens)
        raise DataError(
            f"sequences of {tokens:,} tokens were requested, but the decoder's table of positions ends after "
            f"{longest:,}",
            where=str(ended.target),
            hint=f"use {option('seq_len', longest)}, or less",
        )
    program.lengths.require(tokens)


def _lookups(program: Program) -> Iterator[_Lookup]:
    of_tokens: set[fx.Node] = set()
    for node in program.graph.nodes:
        reads_tokens = (
            of_tokens.intersection(node.all_input_nodes) and ops.packet(node) not in ops.METADATA_ONLY
        )
        if node.op == "placeholder" or reads_tokens:
            of_tokens.add(node)
        found = _read(node)
        if found is not None and found.places not in of_tokens and _is_cheap(found.places):
            yield found


def _read(node: fx.Node) -> _Lookup | None:
    """Return what a node reads where, if it reads some places of a tensor of the decoder's own."""
    table = node.args[0] if node.args else None
    if not isinstance(table, fx.Node) or table.op != "get_attr":
        return None
    if ops.packet(node) in _SLICES:
        dim, end = ops.argument(node, 1, "dim", 0), ops.argument(node, 3, "end")
        if isinstance(dim, int) and isinstance(end, fx.Node):
            return _Lookup(table, dim, end)
        return None
    if ops.packet(node) not in _GATHERS or len(node.all_input_nodes) != 2:
        return None
    dim: Any = 0
    if isinstance(node.args[1], int):  # index_select(table, dim, places)
        dim = node.args[1]
    elif isinstance(node.args[1], Sequence):  # index(table, [places of the first dimension, …])
        dim = [index is not None for index in node.args[1]].index(True)
    return _Lookup(table, dim, node.all_input_nodes[1])


def _is_cheap(node: fx.Node) -> bool:
    """Whether no product of the decoder has to be computed for a value."""
    seen, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        if ops.is_product(current):
            return False
        waiting.extend(set(current.all_input_nodes) - seen)
        seen.update(current.all_input_nodes)
    return True


def _ended(program: Program, lookups: Sequence[_Lookup], tokens: int) -> fx.Node | None:
    """Return the first table that a text of so many tokens reads beyond its end, or None."""
    for lookup in lookups:
        found = _value(lookup.places, program, tokens, {})
        if isinstance(found, Tensor):
            if found.is_meta or not found.numel():  # a decoder without values, or nothing is read
                continue
            found = found.max() + 1
        if int(found) > ops.shape_of(lookup.table)[lookup.dim]:
            return lookup.table
    return None


@torch.no_grad()
def _value(node: fx.Node, program: Program, tokens: int, known: dict[fx.Node, Any]) -> Any:
    if node not in known:
        if node.op == "placeholder":
            known[node] = torch.zeros(1, tokens, dtype=torch.int64, device=program.device)
        elif node.op == "get_attr":
            known[node] = attrgetter(str(node.target))(program.graph_module)
        else:
            assert callable(node.target)
            args, kwargs = (
                fx.map_arg(given, lambda each: _value(each, program, tokens, known))
                for given in (node.args, node.kwargs)
            )
            known[node] = node.target(*args, **kwargs)  # type: ignore[arg-type]
    return known[node]
