"""Where tokens meet: attention, products that sum over tokens, scans, shifts and convolutions along them."""

from collections.abc import Collection

from torch import fx

from dispfx.analysis.flow import Flow
from dispfx.analysis.links import Connection, Contraction, Mixing, links
from dispfx.ir import ops


def mixes_tokens(node: fx.Node, flow: Flow) -> bool:
    """Whether a position of the result depends on several tokens.

    Tokens are along the dimensions whose size changes between runs.  An operation without a rule that may
    mix them counts, and so does any product with a softmax of another product.
    """
    if ops.packet(node) in ops.ATTENTION:
        return True
    between = ops.is_product(node) and len(ops.activations(node, flow.dependent)) > 1
    if not between and ops.packet(node) not in ops.MIXERS:
        return False
    connections = links(node)
    return (
        connections is None
        or any(_along_tokens(one) for one in connections)
        or (between and behind_softmax(node, flow))
    )


def sums_over_tokens(node: fx.Node, flow: Flow) -> bool:
    """Whether the node is a product of two activations that sums over tokens."""
    between = ops.is_product(node) and len(ops.activations(node, flow.dependent)) > 1
    return between and any(
        isinstance(one, Contraction) and ops.is_dynamic(*one.a) for one in links(node) or ()
    )


def _along_tokens(connection: Connection) -> bool:
    match connection:
        case Contraction(a=a):
            return ops.is_dynamic(*a)
        case Mixing(operand=operand):
            return ops.is_dynamic(*operand)
    return False


def behind_softmax(product: fx.Node, flow: Flow, within: Collection[fx.Node] | None = None) -> bool:
    """Whether an operand of the product is a softmax of another product, with no product between.

    Args:
        within: nodes to consider; all by default.
    """
    return weighing(product, flow, within) is not None


def weighing(product: fx.Node, flow: Flow, within: Collection[fx.Node] | None = None) -> fx.Node | None:
    """Return the operand that is such a softmax, or None.  The arguments are those of `behind_softmax`."""

    def stops(node: fx.Node) -> bool:
        return ops.is_product(node) or (within is not None and node not in within)

    for operand in flow.inputs(product):
        inside, met = flow.cone(operand, stop=stops)
        sources = met if within is None else met & set(within)
        if any(map(ops.is_product, sources)) and any(_is_softmax(node, flow) for node in inside):
            return operand
    return None


def _is_softmax(node: fx.Node, flow: Flow) -> bool:
    """Whether the node is a softmax, or the division of one that is written as `e / e.sum()` of `exp`."""
    if ops.packet(node) is not ops.aten.div or not all(isinstance(value, fx.Node) for value in node.args[:2]):
        return ops.packet(node) in ops.SOFTMAX

    def before(value: fx.Node) -> set[fx.Node]:
        return flow.cone(value, stop=ops.is_product)[0]

    numbers = {value for value in before(ops.operand(node, 0)) if ops.packet(value) in ops.EXPONENTIALS}
    sums = [value for value in before(ops.operand(node, 1)) if ops.packet(value) is ops.aten.sum]
    return any(numbers & before(value) for value in sums)
