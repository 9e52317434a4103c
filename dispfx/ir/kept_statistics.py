"""Means and norms over the kept features only, in a graph with full shapes.

With a mask m over H features that keeps K = Σ m of them, a gated graph computes the same as the lowered one
over K features:

    mean(x)             H/K · mean(m·x)
    rms_norm(x)·w       1/s · rms_norm(s·m·x)·w                                   s = √(H/K)
    layer_norm(x)·w + b 1/s · (layer_norm(s·(m·x + (1-m)·μ))·w + b) + (1 - 1/s)·b  μ = H/K · mean(m·x)

since Σ(m·x)²·s²/H = Σ(m·x)²/K, and a removed feature that stands at the mean adds nothing to the variance.
The operations of the captured graph stay what they are, and with a mask of ones every factor is exactly one
or zero, so no bit changes.  All factors are applied by gates, which keep the masks of several samples apart.

`gate_statistics` rewrites one operation, and `restore` takes that back; names tell them where.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from dispfx.ir import ops
from dispfx.ir.gate import GATE
from dispfx.ir.ops import argument, aten, packet


def problem_of(place: fx.Node, value: fx.Node, dim: int) -> str | None:
    """Return why a mean or a norm over dimension `dim` of `value` cannot see kept features alone, or None."""
    if packet(place) is aten.mean:
        dims = argument(place, 1, "dim")
        listed = list(dims) if isinstance(dims, list | tuple) else [dims]
        alone = len(listed) == 1 and isinstance(listed[0], int)
    else:
        shape = argument(place, 1, "normalized_shape")
        alone = isinstance(shape, list | tuple) and len(shape) == 1 and dim == ops.rank(value) - 1
    return None if alone else f"{packet(place)} takes other dimensions along with the features"


def gate_statistics(
    graph: fx.Graph, value: fx.Node, user: fx.Node, mask: fx.Node, dim: int, name: str
) -> None:
    """Let `user`, a mean or a norm over `dim` of `value`, see the features that the mask keeps.

    Args:
        mask: (N,) of the N features.
        name: of the gate on `value`; what takes the place of `user` is found by it (`corrected`).
    """
    users = list(user.users)
    build = _Builder(graph, user, mask, dim, ops.shape_of(value)[dim])
    if packet(user) is aten.mean:
        user.update_arg(0, build.gate(value, mask, name))
        result = build.mean_of_kept(corrected(name))
    else:
        scale = build.call(aten.sqrt.default, build.ratio)
        gated = build.gate(value, build.call(aten.mul.Tensor, mask, scale), name)
        if packet(user) is aten.layer_norm:
            gated = build.call(aten.add.Tensor, gated, build.filled(value, scale), like=value)
        user.update_arg(0, gated)
        result = build.norm_of_kept(scale, corrected(name))
    for taker in users:
        taker.replace_input_with(user, result)


def restore(nodes: Mapping[str, fx.Node], value: fx.Node, user: fx.Node, name: str) -> None:
    """Undo `gate_statistics`; what it inserted is left without users."""
    user.update_arg(0, value)
    nodes[corrected(name)].replace_all_uses_with(user)


def corrected(name: str) -> str:
    """Return the name of what takes the place of the user whose gate has this name."""
    return f"kept_{name}"


@dataclass
class _Builder:
    """Inserts operations on masks before, and corrections after, one mean or norm."""

    graph: fx.Graph
    user: fx.Node
    mask: fx.Node
    dim: int
    features: int

    def __post_init__(self) -> None:
        self._last: fx.Node | None = None
        kept = self.call(aten.clamp_min.default, self.call(aten.sum.dim_IntList, self.mask, [-1], True), 1.0)
        # Divided, not multiplied by a reciprocal: H/H must be exactly one.
        self.ratio = self.call(aten.div.Tensor, self.call(aten.full_like.default, kept, self.features), kept)

    def call(self, target: Any, *args: Any, like: fx.Node | None = None, name: str | None = None) -> fx.Node:
        """Insert an operation before or after the user; its value is like that of `like`."""
        graph, last = self.graph, self._last
        with graph.inserting_before(self.user) if last is None else graph.inserting_after(last):
            node = graph.create_node("call_function", target, args, name=name)
        if last is not None:
            self._last = node
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = target(*values) if like is None else like.meta["val"]
        return node

    def gate(self, value: fx.Node, mask: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(GATE, value, mask, self.dim, like=value, name=name or "statistic")

    def filled(self, value: fx.Node, scale: fx.Node) -> fx.Node:
        """Return the mean of the kept features where a feature is removed, times `scale`."""
        mean = self.call(aten.mean.dim, self.gate(value, self.mask), [self.dim], True)
        spread = self.call(aten.expand_as.default, self.gate(mean, self.ratio), value, like=value)
        removed = self.call(aten.rsub.Scalar, self.mask, 1.0)
        return self.gate(spread, self.call(aten.mul.Tensor, removed, scale))

    def mean_of_kept(self, name: str) -> fx.Node:
        """Return the mean over the kept features, from that of the gated ones over all."""
        mean, ratio = self.user, self.ratio
        self._last = mean
        if argument(mean, 2, "keepdim", False):
            return self.gate(mean, ratio, name)
        found = self.gate(self.call(aten.unsqueeze.default, mean, self.dim), ratio)
        return self.call(aten.squeeze.dim, found, self.dim, like=mean, name=name)

    def norm_of_kept(self, scale: fx.Node, name: str) -> fx.Node:
        """Return the norm of the kept features, from that of the scaled ones."""
        norm, ones = self.user, self.call(aten.ones_like.default, self.mask)
        inverse = self.call(aten.div.Tensor, ones, scale)
        rest = self.call(aten.rsub.Scalar, inverse, 1.0)
        bias = argument(norm, 3, "bias") if packet(norm) is aten.layer_norm else None
        self._last = norm
        if not isinstance(bias, fx.Node):
            return self.gate(norm, inverse, name)
        found = self.gate(norm, inverse)
        spread = self.call(aten.expand_as.default, bias, norm, like=norm)
        return self.call(aten.add.Tensor, found, self.gate(spread, rest), like=norm, name=name)
