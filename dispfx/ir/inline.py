"""Inline the sub-graphs that torch.export makes for gradient and autocast modes.

Gradient mode does not change values.  Autocast that is switched on does, and is refused.
"""

import torch
from torch import fx

from dispfx.errors import UnsupportedGraphError
from dispfx.ir import ops

# Name of the wrapper -> position of its body among the arguments.
_BODY_AT = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def inline_modes(graph: fx.Graph, owner: torch.nn.Module) -> bool:
    """Replace each such wrapper in `graph` by its body; return whether there was one.

    Args:
        graph: rewritten in place.
        owner: holds the sub-graphs that the wrappers name.

    Raises:
        UnsupportedGraphError: for autocast that is switched on.
    """
    changed = False
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or name not in _BODY_AT:
            continue
        if name == "wrap_with_autocast" and node.args[2]:
            raise UnsupportedGraphError(
                "autocast is switched on inside the decoder, so its graph has no fixed dtypes",
                where=ops.source_line(node),
            )
        _inline(graph, node, owner, _BODY_AT[name])
        changed = True
    return changed


def _inline(graph: fx.Graph, node: fx.Node, owner: torch.nn.Module, body_at: int) -> None:
    body = node.args[body_at]
    assert isinstance(body, fx.Node)
    inner = owner.get_submodule(str(body.target))
    assert isinstance(inner, fx.GraphModule)
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
