"""Inline the (possibly nested) sub-graphs that torch.export makes for gradient and autocast modes.

Gradient mode does not change values, nor does disabled autocast outside of an enabled region.  Enabled
autocast
does: torch makes its casts explicit when it traces such a graph again
(`ExportedProgram.run_decompositions`).  The same spells out `torch.vmap`.
"""

from collections.abc import Iterator

import torch
from torch import fx

from dispfx.errors import PassError

# Name of the wrapper -> position of its body among the arguments.
_BODY_AT = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def casts_itself(owner: torch.nn.Module) -> bool:
    """Whether autocast is switched on somewhere in a graph module, or in a sub-graph of it."""
    return any(_wrapper(node) == "wrap_with_autocast" and node.args[2] for node in _all_nodes(owner))


def maps_itself(owner: torch.nn.Module) -> bool:
    """Whether `torch.vmap` begins somewhere in a graph module, or in a sub-graph of it.

    Inside it, values have one dimension less than the tensors that hold them.
    """
    return any(getattr(node.target, "__name__", "") == "_add_batch_dim" for node in _all_nodes(owner))


def _all_nodes(owner: torch.nn.Module) -> Iterator[fx.Node]:
    modules = [module for module in owner.modules() if isinstance(module, fx.GraphModule)]
    return (node for module in modules for node in module.graph.nodes)


def inline_modes(graph: fx.Graph, owner: torch.nn.Module) -> bool:
    """Replace each such wrapper in `graph` by its body; return whether there was one.

    Args:
        graph: rewritten in place; autocast is switched on nowhere in it.
        owner: holds the sub-graphs that the wrappers name.
    """
    wrappers = [node for node in graph.nodes if _wrapper(node) is not None]
    for node in wrappers:
        _inline(graph, node, owner)
    return bool(wrappers)


def _wrapper(node: fx.Node) -> str | None:
    name = getattr(node.target, "__name__", "")
    return name if node.op == "call_function" and name in _BODY_AT else None


def _inline(graph: fx.Graph, node: fx.Node, owner: torch.nn.Module) -> None:
    body_at = _BODY_AT[node.target.__name__]  # type: ignore[union-attr]
    if body_at == 4 and node.args[2]:
        raise PassError("autocast that is switched on was to be spelled out")
    body = node.args[body_at]
    assert isinstance(body, fx.Node)
    inner = owner.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
    inline_modes(inner.graph, inner)
    inputs = [item for item in inner.graph.nodes if item.op == "placeholder"]
    copies = dict(zip(inputs, node.args[body_at + 1 :], strict=True))
    with graph.inserting_before(node):
        results = graph.graph_copy(inner.graph, copies)  # type: ignore[arg-type]
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)
