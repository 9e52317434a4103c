"""From a rewritten graph back to an `ExportedProgram`, without tracing it again: the way `unlifting` came.

    get_attr layers.0.weight    →    placeholder p_layers_0_weight, the tensor in the state dict

Entry point: `lifted`.

1. Inputs keep the symbolic sizes that the capture gave them, so what is free stays free.
2. Values have the shapes that capture and passes noted on their nodes.
3. A lifted program is functional and holds no control flow, as `straight_line` has made it.  Its
   operations are those of the captured graph, in one spelling of several: `aten.to` becomes
   `aten._to_copy`, `&` becomes `aten.bitwise_and`, a size of -1 the size that it stands for, and a reshape
   that changes nothing is gone.
4. `run_decompositions` gives back the program itself.  Who reads it must know its operations.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from dispfx.errors import PassError

aten = torch.ops.aten
_LOGICAL: dict[Any, Any] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
}
# Where each spelling of a cast has its dtype.
_RESHAPES = (aten.view.default, aten.reshape.default)
_CASTS: dict[Any, int | None] = {aten.to.dtype: 1, aten.to.device: 2, aten.to.dtype_layout: None}


class LiftedProgram(ExportedProgram):
    """An exported program that is already as its reader wants it."""

    def run_decompositions(self, *args: Any, **kwargs: Any) -> ExportedProgram:
        """Return the program itself, whatever is to be decomposed."""
        return self


def lifted(module: fx.GraphModule) -> LiftedProgram:
    """Return a graph module as an exported program; `module` is not changed and its tensors are shared.

    Args:
        module: of a captured program, rewritten or not; its inputs hold their captured values in
            `meta["val"]`.

    Raises:
        PassError: if an input has no captured value.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph, sources = _with_tensors_as_inputs(module.graph)
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    mode = next((mode for value in inputs if (mode := getattr(value, "fake_mode", None))), None)
    if mode is None:
        raise PassError("the graph's inputs must hold what they were captured with")
    for node in graph.nodes:
        if node.name in sources:
            tensor = tensors[sources[node.name]].detach()
            node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        _respell(node)
    return _program(fx.GraphModule(nn.Module(), graph), sources, tensors)


def _with_tensors_as_inputs(source: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """Return a copy of a graph whose tensors come first among its inputs, and the path of each by name."""
    graph, copies, sources = fx.Graph(), {}, {}
    for node in source.nodes:
        if node.op == "get_attr":
            path = str(node.target)
            copies[node] = graph.placeholder(f"p_{path.replace('.', '_')}")
            sources[copies[node].name] = path
    for node in source.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
    output = graph.output_node()
    value = output.args[0]
    output.args = (tuple(value) if isinstance(value, list | tuple) else (value,),)
    return graph, sources


def _respell(node: fx.Node) -> None:
    """Apply rule 3."""
    if node.target in _LOGICAL:
        node.target = _LOGICAL[node.target]
    elif node.target in _CASTS:
        place = _CASTS[node.target]
        by_place = node.args[place] if place is not None and len(node.args) > place else None
        node.target = aten._to_copy.default
        node.args, node.kwargs = node.args[:1], {"dtype": node.kwargs.get("dtype", by_place)}
    elif node.target in _RESHAPES:
        _respell_reshape(node)


def _respell_reshape(node: fx.Node) -> None:
    operand, asked = node.args
    found = node.meta["val"].shape
    assert isinstance(operand, fx.Node) and isinstance(asked, list | tuple)
    if str(operand.meta["val"].shape) == str(found):
        node.replace_all_uses_with(operand)
        node.graph.erase_node(node)
        return
    known = [
        size if old == -1 and isinstance(size, int) else old for old, size in zip(asked, found, strict=True)
    ]
    node.args = (operand, known)


def _program(root: fx.GraphModule, sources: dict[str, str], tensors: dict[str, Tensor]) -> LiftedProgram:
    inputs, arguments = [], []
    for node in root.graph.nodes:
        if node.op != "placeholder":
            continue
        path = sources.get(node.name)
        if path is None:
            inputs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None))
            arguments.append(inputs[-1].arg)
        elif isinstance(tensors[path], nn.Parameter):
            inputs.append(InputSpec(InputKind.PARAMETER, TensorArgument(node.name), path))
        else:
            inputs.append(InputSpec(InputKind.BUFFER, TensorArgument(node.name), path, persistent=True))
    returned: Any = root.graph.output_node().args[0]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in returned]
    nothing: list[Any] = [None] * len(arguments)
    signature = ModuleCallSignature(
        arguments,
        [output.arg for output in outputs],
        in_spec=pytree.tree_structure((tuple(nothing), {})),
        out_spec=pytree.tree_structure(tuple(None for _ in outputs)),
    )
    used = {path: tensors[path] for path in sources.values()}
    return LiftedProgram(
        root,
        root.graph,
        ExportGraphSignature(inputs, outputs),
        used,
        {},
        [ModuleCallEntry("", signature)],
    )
