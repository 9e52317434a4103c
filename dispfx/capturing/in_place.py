"""Spell operations in place as what they compute, where nothing else sees the tensor that they write.

    y = div_(x, s)    →    y = div(x, s)

Rules:
1. The operation writes its first operand x, and without the underscore it gives the same numbers in x's
   dtype: it puts numbers in places, or is pointwise and all its tensors are of one dtype.
2. x is a new tensor, of an operation that returns no part of its own operands, or a view of one that nothing
   else reads; parameters and inputs stay as they are.
3. This is the last reader of x, and no reader before it returns a view of x.

An operation made of others may return its operand as it is and not say so (`dropout`); it counts as a view.
What is left alone, torch makes functional, which traces the whole graph again.
"""

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from dispfx.ir.ops import aten, is_product, mutates, packet

_MADE_OF_OTHERS = torch._C.DispatchKey.CompositeImplicitAutograd
# These give the dtype of their first operand.
_PUT = {aten.index_put_, aten.scatter_, aten.masked_fill_, aten.index_copy_, aten.fill_, aten.detach_}


def spell_in_place(graph: fx.Graph) -> bool:
    """Rewrite what the rules allow, and return whether no operation in place is left."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    left = 0
    for node in [node for node in graph.nodes if mutates(node)]:
        plain = _without_writing(node)
        if plain is None or not _is_alone(node, places):
            left += 1
            continue
        with graph.inserting_before(node):
            twin = graph.call_function(plain, node.args, node.kwargs)
        twin.meta = dict(node.meta)
        places[twin] = places[node]
        node.replace_all_uses_with(twin)
        graph.erase_node(node)
    return not left


def writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield every operation in place, and the value whose memory it writes, seen through views."""
    for node in filter(mutates, graph.nodes):
        written = node.args[0]
        while isinstance(written, fx.Node) and written.op == "call_function" and _shares(written):
            written = written.args[0]
        if isinstance(written, fx.Node):
            yield node, written


def _shares(node: fx.Node) -> bool:
    return _aliases(node) or mutates(node)


def _without_writing(node: fx.Node) -> torch._ops.OpOverload | None:
    """Return the operation that gives what `node` gives and writes nothing, if rule 1 holds."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    space, _, name = target._schema.name.partition("::")
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    same = packet(node) in _PUT or (torch.Tag.pointwise in target.tags and len(dtypes) == 1)
    if not name.endswith("_") or not same:
        return None
    plain = getattr(getattr(getattr(torch.ops, space), name[:-1], None), target._overloadname, None)
    return plain if isinstance(plain, torch._ops.OpOverload) else None


def _is_alone(node: fx.Node, places: dict[fx.Node, int]) -> bool:
    """Return whether rules 2 and 3 hold for the first operand."""
    written = node.args[0]
    if not isinstance(written, fx.Node):
        return False
    others = [user for user in written.users if user is not node]
    while _aliases(written):
        base = written.args[0] if written.op == "call_function" else None
        if not isinstance(base, fx.Node) or list(base.users) != [written] or len(written.all_input_nodes) > 1:
            return False
        written = base
    return all(places[user] < places[node] and user.op == "call_function" for user in others) and not any(
        map(_aliases, others)
    )


def _aliases(node: fx.Node) -> bool:
    """Whether a value may share its memory with an operand; inputs and parameters count as sharing."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return _aliases(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return True
    hidden = node.target.has_kernel_for_dispatch_key(_MADE_OF_OTHERS)  # type: ignore[union-attr]
    says = any(returned.alias_info is not None for returned in schema.returns)
    return says or (hidden and not is_product(node))
