"""Recognise norms over the last dimension.

    LayerNorm            layer_norm(x, (D,), w, b, ε)
    root mean square     rms_norm(x, (D,), w, ε)
                         w · (x · rsqrt(mean(x²) + ε)), with or without a cast between the two products

Legend: D width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, packet


@dataclass(frozen=True)
class Norm:
    """A norm that was recognised.

    Args:
        value: what is normalised.
        weight: (D,), multiplies the normalised value.
        bias: (D,), is added to that; none for a root mean square.
        eps: added to the variance or the mean square.
        is_rms: whether it divides by the root of the mean square; else it is a LayerNorm.
        rounds: whether the normalised value is cast to the dtype of `value` before the weight multiplies it.
    """

    value: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    eps: float
    is_rms: bool
    rounds: bool


def norm_of(result: fx.Node, is_weight: Callable[[fx.Node], bool]) -> Norm | None:
    """Return the norm that a node is the result of, in the dtype of what is normalised, or None.

    A root mean square is computed in float32, or in float64 where its value is.

    Args:
        result: the last operation of it.
        is_weight: whether a node is known to be no activation.
    """
    return _one_operation(result) or _root_mean_square(result, is_weight)


def _one_operation(result: fx.Node) -> Norm | None:
    is_rms = packet(result) is aten.rms_norm
    if not is_rms and packet(result) is not aten.layer_norm:
        return None
    x, shape = result.args[:2]
    weight, bias = argument(result, 2, "weight"), None if is_rms else argument(result, 3, "bias")
    assert isinstance(x, fx.Node)
    if not isinstance(weight, fx.Node) or list(shape) != [ops.shape_of(x)[-1]]:  # type: ignore[call-overload]
        return None
    # What torch adds where a module gives none: the smallest step of the dtype that it computes in.
    default = torch.finfo(_exact(x.meta["val"].dtype)).eps if is_rms else 1e-5
    eps = argument(result, 3 if is_rms else 4, "eps", default)
    assert eps is None or isinstance(eps, float)
    given = bias if isinstance(bias, fx.Node) else None
    return Norm(x, weight, given, default if eps is None else eps, is_rms=is_rms, rounds=False)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a root mean square is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _root_mean_square(result: fx.Node, is_weight: Callable[[fx.Node], bool]) -> Norm | None:
    pair = _split(_uncast(result), is_weight)
    if pair is None:
        return None
    weight, scaled = pair
    pair = _split(_uncast(scaled), lambda operand: packet(operand) is aten.rsqrt)
    if pair is None:
        return None
    inverse_root, whole = pair
    eps = _eps_of_mean_square(inverse_root, whole)
    x = _uncast(whole)
    dtype = x.meta["val"].dtype
    exact = _exact(dtype)
    fits = result.meta["val"].dtype == dtype and whole.meta["val"].dtype == exact
    if eps is None or not fits or ops.shape_of(weight) != ops.shape_of(result)[-1:]:
        return None
    rounds = scaled.meta["val"].dtype == dtype != exact
    return Norm(x, weight, None, eps, is_rms=True, rounds=rounds)


def _split(node: fx.Node, is_first: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node] | None:
    """Return the operands of a product of two values, the one that fits first."""
    operands = [value for value in node.args if isinstance(value, fx.Node)]
    if packet(node) is not aten.mul or len(operands) != 2:
        return None
    for first, second in (operands, operands[::-1]):
        if is_first(first):
            return first, second
    return None


def _uncast(node: fx.Node) -> fx.Node:
    operand = node.args[0] if packet(node) in ops.CASTS else None
    return operand if isinstance(operand, fx.Node) else node


def _eps_of_mean_square(inverse_root: fx.Node, whole: fx.Node) -> float | None:
    """Return ε where a value is rsqrt(mean(whole², −1) + ε), else None."""
    shifted = inverse_root.args[0]
    if not isinstance(shifted, fx.Node) or packet(shifted) is not aten.add or shifted.kwargs:
        return None
    mean, eps = shifted.args[0], shifted.args[1]
    if not isinstance(mean, fx.Node) or packet(mean) is not aten.mean or not isinstance(eps, float):
        return None
    square, dims = mean.args[0], argument(mean, 1, "dim")
    last = dims is not None and list(dims) in ([-1], [ops.rank(whole) - 1])  # type: ignore[call-overload]
    last = last and argument(mean, 2, "keepdim", False)
    is_square = isinstance(square, fx.Node) and packet(square) is aten.pow and square.args == (whole, 2)
    return eps if last and is_square else None
