"""Which module a site's weights, values and norms belong to, read off the canonical graph.

A weight's path names its module, and the graph remembers for every value in which module's forward it was
computed.  Nothing here looks at a module's name.
"""

import operator
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.positions import kept_positions
from dispfx.ir import ops
from dispfx.ir.program import Program
from dispfx.ir.sites import GatePoint, Site

_BIAS_FIRST = ops.packets("addmm baddbmm")
_BIAS_THIRD = ops.packets("linear conv1d convolution")
_EQUAL_PARTS = ops.packets("chunk unsafe_chunk glu")


@dataclass
class Facts:
    """Answers about one program.

    Args:
        program: canonical, with its sites.
    """

    program: Program
    nodes: dict[str, fx.Node] = field(init=False)
    product_weights: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = self.program.nodes
        self._flow = Flow.of(self.program.graph)
        products = [node for node in self.nodes.values() if ops.is_product(node)]
        self.product_weights = frozenset(path for node in products for path in _factors(node))

    def consumed(self, site: Site) -> frozenset[str]:
        """Return the weights of the products that take the site's gated values."""
        users = [self.nodes[user] for point in site.gates for user in point.users]
        products = [user for user in users if ops.is_product(user)]
        cut = {piece.parameter for piece in site.slices}
        return frozenset(path for user in products for path in _factors(user) if path in cut)

    def averaged(self, site: Site) -> bool:
        """Whether a mean over the site's features takes a gated value."""
        users = [self.nodes[user] for point in site.gates for user in point.users]
        return any(ops.packet(user) in ops.AVERAGES for user in users)

    def adds(self, parameter: str) -> bool:
        """Whether a parameter is combined with activations in any way but by multiplication.

        A product with zero is zero whatever the parameter becomes; a sum is not.
        """
        starts = [node for node in self.nodes.values() if node.op == "get_attr" and node.target == parameter]
        pending = list(starts)
        while pending:
            node = pending.pop()
            for user in node.users:
                if user not in self._flow.dependent:
                    pending.append(user)
                elif ops.packet(user) is not ops.aten.mul:
                    return True
        return False

    def passes_any_width(self, site: Site, mask: np.ndarray, owners: set[str]) -> bool:
        """Whether the code between a site's producers and consumers takes the features that `mask` keeps.

        It does where only pointwise operations and splits into parts that stay equal touch the features, as
        the last dimension.  What the modules of the site do inside does not count: they know their sizes.
        Experts with features of their own keep equally many, so that one stands for all.
        """
        if self.averaged(site):
            return False
        mask = mask if mask.ndim == 1 else mask[0]
        for (name, dim), labels in self.program.closures[site.name].items():
            node = self.nodes[name]
            if node.op == "get_attr" or module_of(node) in owners:
                continue
            if ops.is_tensor(node) and dim != ops.rank(node) - 1:
                return False
            if not (ops.is_pointwise(node) or _is_part(node)):
                return False
            parts = [_number_of_parts(user) for user in node.users if ops.packet(user) in _EQUAL_PARTS]
            if not all(_equally_kept(kept_positions(labels, mask), number) for number in parts):
                return False
        return True

    def cuts_buffers(self, site: Site) -> bool:
        """Whether a tensor that is no parameter is cut with a site."""
        nodes = [self.nodes[name] for name, _ in self.program.closures[site.name]]
        return any(node.op == "get_attr" and not ops.is_parameter(node) for node in nodes)

    def widths(self, site: Site, mask: np.ndarray, *, of_weights: bool) -> dict[int, int]:
        """Return how long axes of weights, or other dimensions, that follow a site become, by their length.

        Lengths that become several others are left out.
        """
        found: dict[int, set[int]] = {}
        for (name, _), labels in self.program.closures[site.name].items():
            if of_weights == (self.nodes[name].op == "get_attr"):
                found.setdefault(len(labels), set()).add(int(kept_positions(labels, mask).sum()))
        return {length: after.pop() for length, after in found.items() if len(after) == 1}

    def norm_of(self, site: Site, owners: set[str], leaves: set[str]) -> str | None:
        """Return the module whose output is read by this site alone, or None.

        Args:
            owners: modules that own the site's weights.
            leaves: paths of modules without children.
        """
        entries = {self._entry(point, owners) for point in site.gates}
        if len(entries) != 1:
            return None
        entry = entries.pop()
        norm = module_of(entry)
        if norm not in leaves or norm in owners or entry.op == "get_attr":
            return None
        if any(module_of(user) not in owners and not _asks_for_size(user) for user in entry.users):
            return None
        exits = [
            node
            for node in self.nodes.values()
            if module_of(node) == norm and any(module_of(user) != norm for user in node.users)
        ]
        return norm if exits == [entry] else None

    def _entry(self, point: GatePoint, owners: set[str]) -> fx.Node:
        """Return the value that the modules are given from which the gated value is a view."""
        node = self.nodes[point.value]
        while module_of(node) in owners and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module whose forward computed a value, "" where unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    # The capture wraps the decoder in a module of its own, one level deep.
    return path.partition(".")[2].partition("@")[0]


def owner_of(parameter: str) -> str:
    """Return the path of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def _factors(product: fx.Node) -> list[str]:
    """Return the paths of the weights that a product multiplies with, without biases."""
    paths = [ops.weight_of(value) for value in ops.operands(product) if value is not _bias_of(product)]
    return [path for path in paths if path is not None]


def _bias_of(product: fx.Node) -> object:
    if ops.packet(product) in _BIAS_FIRST:
        return product.args[0]
    return ops.argument(product, 2, "bias") if ops.packet(product) in _BIAS_THIRD else None


def _is_part(node: fx.Node) -> bool:
    """Whether a value is a part of another that is split into equal parts, or all of them."""
    whole = node.args[0] if node.target is operator.getitem else node
    return isinstance(whole, fx.Node) and ops.packet(whole) in _EQUAL_PARTS


def _number_of_parts(split: fx.Node) -> int:
    value = split.meta.get("val")
    return len(value) if isinstance(value, list | tuple) else 2


def _equally_kept(stays: np.ndarray, parts: int) -> bool:
    if len(stays) % parts:
        return False
    return len(set(stays.reshape(parts, -1).sum(axis=1).tolist())) == 1


def _asks_for_size(node: fx.Node) -> bool:
    return ops.packet(node) in ops.METADATA_ONLY and "sym_size" in str(node.target)
