"""Kinds of connection between the dimensions of an operation's operands and its result."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import rank, shape_of

Dimension: TypeAlias = tuple[fx.Node, int]
Positions: TypeAlias = np.ndarray | None


@dataclass(frozen=True, eq=False)
class Link:
    """Two dimensions that share features.

    Args:
        a, b: (node, number of the dimension, from 0).
        a_positions, b_positions: integer arrays (n,): position a_positions[i] of `a` is position
            b_positions[i] of `b`.  Both are None where position i matches position i.
    """

    a: Dimension
    b: Dimension
    a_positions: Positions = None
    b_positions: Positions = None


@dataclass(frozen=True, eq=False)
class Alternatives:
    """A dimension that a reshape splits: its features follow one of the factors, or none."""

    whole: Dimension
    factors: tuple[Link, ...]


@dataclass(frozen=True, eq=False)
class Contraction:
    """A product sums over dimension `a` of one operand and `b` of another."""

    a: Dimension
    b: Dimension


@dataclass(frozen=True, eq=False)
class Mixing:
    """All positions of a dimension enter each result; `average` if the result is a divided sum."""

    operand: Dimension
    average: bool = False


@dataclass(frozen=True, eq=False)
class Free:
    """All positions of a dimension of the result are alike; its size is an argument of the operation."""

    result: Dimension


Connection: TypeAlias = Link | Alternatives | Contraction | Mixing | Free


def ends(connection: Connection) -> tuple[Dimension, ...]:
    """Return the dimensions of a connection."""
    match connection:
        case Link(a=a, b=b) | Contraction(a=a, b=b):
            return (a, b)
        case Alternatives(whole=whole, factors=factors):
            return (whole, *(factor.b for factor in factors))
        case Mixing(operand=dimension) | Free(result=dimension):
            return (dimension,)


def same(a: fx.Node, a_dim: int, b: fx.Node, b_dim: int) -> list[Connection]:
    """Link two dimensions position by position, unless one of them is broadcast."""
    size = shape_of(a)[a_dim]
    return [Link((a, a_dim), (b, b_dim))] if size == shape_of(b)[b_dim] and size != 1 else []


def aligned(value: fx.Node, node: fx.Node, *, but_last: int = 0) -> list[Connection]:
    """Link dimensions from the right, except the last `but_last` of both."""
    found: list[Connection] = []
    for back in range(1 + but_last, min(rank(value), rank(node)) + 1):
        found += same(value, rank(value) - back, node, rank(node) - back)
    return found


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    return [value for value in ops.operands(node) if ops.is_tensor(value)]


def dimension(value: fx.Node, dim: object) -> int:
    assert isinstance(dim, int)
    return dim % max(rank(value), 1)
