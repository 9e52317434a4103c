"""Rules of operations that contract a dimension of two operands, and of table look-ups."""

import numpy as np
from torch import fx

from dispfx.analysis.links.connections import Connection, Contraction, Link, Mixing, aligned, same
from dispfx.ir.ops import argument, groups_of, is_depthwise, operand, rank, shape_of


def linear(node: fx.Node) -> list[Connection]:
    x, weight = operand(node, 0), operand(node, 1)
    bias = argument(node, 2, "bias")
    out = rank(x) - 1
    found = [link for dim in range(out) for link in same(x, dim, node, dim)]
    if rank(weight) == 1:  # one number for every vector
        return [*found, Contraction((x, out), (weight, 0))]
    found += same(weight, 0, node, out)
    if isinstance(bias, fx.Node):
        found += same(bias, 0, node, out)
    return [*found, Contraction((x, out), (weight, 1))]


def matrix_product(node: fx.Node, first: int = 0) -> list[Connection]:
    a, b = operand(node, first), operand(node, first + 1)
    if rank(a) < 2 or rank(b) < 2:
        return [*_vector_product(node, a, b)]
    found = aligned(a, node, but_last=2) + aligned(b, node, but_last=2)
    found += same(a, rank(a) - 2, node, rank(node) - 2)
    found += same(b, rank(b) - 1, node, rank(node) - 1)
    return [*found, Contraction((a, rank(a) - 1), (b, rank(b) - 2))]


def _vector_product(node: fx.Node, a: fx.Node, b: fx.Node) -> list[Connection]:
    found: list[Connection] = [Contraction((a, rank(a) - 1), (b, max(rank(b) - 2, 0)))]
    if rank(a) > 1:
        found += [link for dim in range(rank(a) - 1) for link in same(a, dim, node, dim)]
    if rank(b) > 1:
        found += same(b, rank(b) - 1, node, rank(node) - 1)
    return found


def grouped(node: fx.Node) -> list[Connection] | None:
    """Rows (S, K) by one matrix each of a stack (E, K, N): the stack's own dimension is no feature."""
    rows, stack = operand(node, 0), operand(node, 1)
    if rank(rows) != 2 or rank(stack) != 3:
        return None
    found = same(rows, 0, node, 0) + same(stack, 2, node, 1)
    return [*found, Contraction((rows, 1), (stack, 1))]


def with_addend(node: fx.Node) -> list[Connection]:
    return aligned(operand(node, 0), node) + matrix_product(node, first=1)


def convolution(node: fx.Node) -> list[Connection]:
    """A convolution over time: channels are contracted, or, where each has its own filter, kept.

    Channels in several groups mix: a cut that leaves groups of different sizes is no convolution.
    """
    x, weight = operand(node, 0), operand(node, 1)
    bias = argument(node, 2, "bias")
    if groups_of(node) != 1 and not is_depthwise(node):
        return same(x, 0, node, 0)
    found = same(x, 0, node, 0) + same(weight, 0, node, 1)
    if isinstance(bias, fx.Node):
        found += same(bias, 0, node, 1)
    if is_depthwise(node):
        return found + same(x, 1, node, 1)
    return [*found, Contraction((x, 1), (weight, 1))]


def einsum(node: fx.Node) -> list[Connection] | None:
    equation, values = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(values, list | tuple)
    where = [value for value in values if isinstance(value, fx.Node)]
    if "->" not in equation or len(where) != len(values):
        return None
    terms, result = _letters(equation.replace(" ", ""), [rank(value) for value in where])
    found: list[Connection] = []
    for letter in sorted(set("".join(terms))):
        holders = [
            (value, term.index(letter)) for value, term in zip(where, terms, strict=True) if letter in term
        ]
        if letter in result:
            out = result.index(letter)
            found += [link for value, dim in holders for link in same(value, dim, node, out)]
        elif len(holders) == 2:
            found.append(Contraction(*holders))
        else:
            found += [Mixing(holder) for holder in holders]
    return found


def _letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Return the terms of an equation and its result, with a digit for each dimension that dots stand for."""
    inputs, result = equation.split("->")
    terms = inputs.split(",")
    hidden = [size - len(term.replace("...", "")) for term, size in zip(terms, ranks, strict=True)]
    digits = "0123456789"[: max(hidden)]
    spelt = [
        term.replace("...", digits[len(digits) - count :]) for term, count in zip(terms, hidden, strict=True)
    ]
    return spelt, result.replace("...", digits)


def tensordot(node: fx.Node) -> list[Connection]:
    values = operand(node, 0), operand(node, 1)
    summed = [
        [dim % rank(value) for dim in argument(node, 2 + at, name)]  # type: ignore[union-attr]
        for at, (value, name) in enumerate(zip(values, ("dims_self", "dims_other"), strict=True))
    ]
    found: list[Connection] = [
        Contraction((values[0], a), (values[1], b)) for a, b in zip(*summed, strict=True)
    ]
    left = [
        (value, dim)
        for value, dims in zip(values, summed, strict=True)
        for dim in range(rank(value))
        if dim not in dims
    ]
    return found + [link for out, (value, dim) in enumerate(left) for link in same(value, dim, node, out)]


def attention(node: fx.Node) -> list[Connection]:
    query, key, value = (operand(node, index) for index in range(3))
    last, tokens = rank(node) - 1, rank(node) - 2
    found = same(query, tokens, node, tokens) + same(value, rank(value) - 1, node, last)
    shares = bool(node.kwargs.get("enable_gqa", False))
    mask = argument(node, 3, "attn_mask")
    if isinstance(mask, fx.Node):
        found += aligned(mask, node, but_last=2)
    for tensor in (query, key, value):
        found += aligned(tensor, node, but_last=3 if shares else 2)
        if shares:
            found += _shared_heads(tensor, node)
    found.append(Contraction((query, rank(query) - 1), (key, rank(key) - 1)))
    return [*found, Contraction((key, rank(key) - 2), (value, rank(value) - 2))]


def _shared_heads(tensor: fx.Node, node: fx.Node) -> list[Connection]:
    """Head i of the result reads head i // n of keys and values that n heads share."""
    mine, theirs = rank(tensor) - 3, rank(node) - 3
    heads, results = shape_of(tensor)[mine], shape_of(node)[theirs]
    if heads == results:
        return same(tensor, mine, node, theirs)
    if heads == 1:
        return []
    reads = np.arange(results)
    return [Link((tensor, mine), (node, theirs), reads // (results // heads), reads)]


def embedding(node: fx.Node) -> list[Connection]:
    weight, ids = operand(node, 0), operand(node, 1)
    found = [link for dim in range(rank(ids)) for link in same(ids, dim, node, dim)]
    return found + same(weight, 1, node, rank(node) - 1)
