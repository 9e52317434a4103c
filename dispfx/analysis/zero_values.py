"""Whether removed features are zero, and not only gated away.

    y = down(h)           zero where the rows of `down` are zero
    y = sigmoid(down(h))  one half there
    y = down(h) + 1       one there

Entry point: `not_zero`.  A gate before a product needs no such proof, because the weight's own positions are
zero; a computed weight must be shown to be zero.  At a write, or at a mean, the gated value itself must be
zero if the parameters are; otherwise a mask differs from smaller weights.

Rules:
1. A parameter is zero where it is cut; a buffer is cut with it and keeps its value.
2. A product is zero where its weight is, unless a nonzero value is added.
3. A pointwise operation is evaluated on zeros for zero operands, and on positive and negative numbers
   elsewhere.  So is an operation with a registered link rule; if it cannot be evaluated, it counts as
   nonzero.
4. A softmax is not zero, and a norm is only if it adds nothing; any other operation passes zeros on.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dispfx.analysis.label_map import Closure, Mismatch
from dispfx.analysis.links import Link, is_registered, links
from dispfx.analysis.links.places import pad_fill
from dispfx.ir import ops
from dispfx.ir.ops import aten, packet

_ZERO_FILLED = ops.packets("zeros zeros_like new_zeros")
# Operation, and the position of its fill value.
_FILLED: dict[object, int] = {aten.full: 1, aten.full_like: 1, aten.new_full: 2}
_PADS = ops.packets("pad constant_pad_nd")
_ADDENDS = ops.packets("addmm baddbmm")


def not_zero(closure: Closure) -> Mismatch | None:
    """Return why a gated value is not zero where the closure's parameters are, or None where all are."""
    edges = [(value, user) for value, _, user in closure.gates if not _weight_is_cut(closure, user)]
    if not edges:
        return None
    zero = _zeros(closure)
    value = next((found for edge in edges if (found := _left_over(*edge, zero)) is not None), None)
    return None if value is None else _mismatch(closure, value, zero)


def _mismatch(closure: Closure, value: fx.Node, zero: Mapping[fx.Node, bool]) -> Mismatch:
    cause = _first_cause(value, zero)
    parameters = [node for node, _ in closure.labels if node.op == "get_attr"]
    largest = max(parameters, key=lambda node: (ops.rank(node), str(node.target)), default=None)
    return Mismatch(
        f"{packet(cause)} of zero is not zero, so zero weights do not remove the features",
        cause,
        parameter=None if largest is None else str(largest.target),
    )


def _weight_is_cut(closure: Closure, user: fx.Node) -> bool:
    """Whether a gate is before a product with a weight that is cut along the same features."""
    labelled = {node for node, _ in closure.labels}
    return ops.is_product(user) and any(
        ops.weight_of(value) is not None and value in labelled for value in ops.operands(user)
    )


def _left_over(value: fx.Node, user: fx.Node, zero: Mapping[fx.Node, bool]) -> fx.Node | None:
    """Return the gated value, or the computed weight it is multiplied with, that is not zero, or None."""
    factors = [other for other in ops.operands(user) if other is not value and other in zero]
    if not ops.is_product(user) or not factors:
        return None if zero.get(value, True) else value
    done = zero.get(value, False) or any(zero[factor] for factor in factors)
    return None if done else factors[0]


def _zeros(closure: Closure) -> dict[fx.Node, bool]:
    """Return for every labelled value whether it is zero where its features are removed."""
    zero: dict[fx.Node, bool] = {}
    for node in sorted({node for node, _ in closure.labels}):
        zero[node] = _is_zero(node, zero)
    return zero


def _is_zero(node: fx.Node, zero: Mapping[fx.Node, bool]) -> bool:
    if node.op != "call_function":
        return node.op != "get_attr" or ops.is_parameter(node)
    if packet(node) in ops.METADATA_ONLY | ops.FACTORIES:
        return _is_filled_with_zeros(node)
    if packet(node) in _PADS and pad_fill(node) != 0:
        return False
    if packet(node) in ops.SOFTMAX or "softmax" in str(packet(node)):
        return False
    if packet(node) is aten.expand_as:
        return zero.get(node.args[0], False)  # type: ignore[arg-type]
    given = _given(node, zero)
    if ops.contracts(node) or packet(node) in ops.CONVOLUTIONS:
        added = [value for value in ops.operands(node) if value in zero and not _multiplies(node, value)]
        factors = [value for value in given if value not in added]
        return any(zero[value] for value in factors) and all(zero[value] for value in added)
    if packet(node) in ops.NORMS:
        return all(zero.get(value, False) for value in _bias(node))
    if is_registered(node):
        return any(zero[value] for value in given) and _stays_zero(node, zero, untried=False)
    if ops.is_pointwise(node) and packet(node) not in ops.CASTS | ops.COPIES:
        return _stays_zero(node, zero, untried=True)
    return bool(given) and all(zero[value] for value in given)


def _is_filled_with_zeros(node: fx.Node) -> bool:
    place = _FILLED.get(packet(node))
    if place is None:
        return packet(node) in _ZERO_FILLED
    number = ops.argument(node, place, "fill_value")
    return isinstance(number, int | float) and number == 0


def _given(node: fx.Node, zero: Mapping[fx.Node, bool]) -> list[fx.Node]:
    """Return the labelled values that a node takes features from."""
    found = [link for link in links(node) or () if isinstance(link, Link)]
    ends = {end[0] for link in found for end in (link.a, link.b)} - {node}
    return [value for value in sorted(ends) if value in zero]


def _multiplies(product: fx.Node, value: fx.Node) -> bool:
    """Whether an operand of a product is a factor; otherwise it is added."""
    if packet(product) in _ADDENDS:
        return value is not product.args[0]
    return value is not ops.argument(product, 2, "bias") or not _has_bias(product)


def _has_bias(product: fx.Node) -> bool:
    return packet(product) in ops.packets("linear conv1d convolution")


def _bias(norm: fx.Node) -> list[fx.Node]:
    """Return what a norm adds after its scale."""
    if packet(norm) not in ops.packets("layer_norm native_layer_norm group_norm"):
        return []
    bias = ops.argument(norm, 3, "bias")
    return [bias] if isinstance(bias, fx.Node) else []


def _stays_zero(node: fx.Node, zero: Mapping[fx.Node, bool], *, untried: bool) -> bool:
    """Try a pointwise operation on single numbers; `untried` is the answer where it refuses them."""
    generator = torch.Generator().manual_seed(0)
    signs = (1,) if packet(node) is aten.pow else (1, -1)  # a power of zero below zero is infinite
    for truth, sign in product((True, False, None), signs):
        number = partial(_number, zero=zero, truth=truth, sign=sign, generator=generator)
        try:
            args, kwargs = (map_arg(part, number) for part in (node.args, node.kwargs))
            result = node.target(*args, **{**kwargs, **_here(kwargs)})  # type: ignore[operator]
        except Exception:  # an operation may refuse single numbers
            return untried
        if not isinstance(result, Tensor) or bool((result != 0).any()):
            return False
    return True


def _number(
    value: fx.Node, zero: Mapping[fx.Node, bool], truth: bool | None, sign: int, generator: torch.Generator
) -> Any:
    """Return one number for a value: zero where that is known, beyond `sign` elsewhere, or a size."""
    meta = value.meta.get("val")
    if not isinstance(meta, Tensor):
        return ops.size_hint(meta) if isinstance(meta, torch.SymInt | int) else 3
    drawn = 1 + torch.randn(1, generator=generator).abs()
    if meta.dtype == torch.bool:
        return drawn < 1.7 if truth is None else torch.tensor([truth])
    return (drawn * 0 if zero.get(value, False) else drawn * sign).to(meta.dtype)


def _here(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Compute on the CPU, on whichever device the decoder is."""
    return {"device": "cpu"} if "device" in kwargs else {}


def _first_cause(value: fx.Node, zero: Mapping[fx.Node, bool]) -> fx.Node:
    """Return the first value on the way that is not zero though all that it takes is."""
    while True:
        given = (
            other
            for other in _given(value, zero)
            if not ops.is_boolean(other) and other.op == "call_function"
        )
        earlier = next((other for other in given if not zero[other]), None)
        if earlier is None:
            return value
        value = earlier
