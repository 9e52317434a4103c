"""From an `ExportedProgram` to a program: a graph that owns the decoder's tensors under their own paths.

    placeholder p_layers_0_weight    →    get_attr layers.0.weight

Entry point: `program_of`.  Inputs of the exported module that the program does not name are left out,
and so are outputs; tied parameters are read under their first path.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from dispfx.capturing.in_place import spell_in_place, writes
from dispfx.capturing.inlining import casts_itself, inline_modes, maps_itself
from dispfx.capturing.refusals import refuse_export
from dispfx.errors import CaptureError
from dispfx.ir.ops import operation, source_line
from dispfx.ir.program import Program, with_tensors

SAMPLED_VALUES = 64

_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def program_of(
    exported: ExportedProgram,
    model: nn.Module,
    inputs: Mapping[str, str],
    outputs: Mapping[str, fx.Node],
    *,
    prefix: str = "",
) -> Program:
    """Return the program of an exported module.

    Args:
        exported: made straight by `straight_line`.
        model: the decoder; paths, ties and fingerprint are taken from it.
        inputs: name of each input -> its placeholder in the exported graph; token ids first.
        outputs: name of each output -> its value in the exported graph; logits first.
        prefix: what the exported module puts in front of the decoder's own paths.

    Raises:
        CaptureError: if the graph holds control flow that depends on data, or an object that is no tensor.
    """
    own = _own_tensors(model)
    ties = _ties(model)
    constants = {path.removeprefix(prefix): tensor for path, tensor in exported.constants.items()}
    tensors = {**constants, **own}
    graph = _unlifted(exported, ties, inputs, outputs, prefix)
    graph_module = with_tensors(graph, {path: tensors[path] for path in _paths_read(graph)})
    read = dict(graph_module.named_parameters()) | dict(graph_module.named_buffers())
    return Program(
        graph_module,
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        fingerprint=fingerprint(model),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        ties=ties,
        unused={path: tensor for path, tensor in own.items() if path not in read and path not in ties},
    )


def straight_line(exported: ExportedProgram, where: str, prefix: str) -> ExportedProgram:
    """Inline gradient and autocast modes and `torch.vmap`, and make the operations in place functional.

    Args:
        where: the module's class, for errors without a line of its own.
        prefix: what the exported module puts in front of the decoder's own paths.

    Raises:
        CaptureError: if torch cannot make them functional, as where a parameter is written.
    """
    try:
        return _straight_line(exported)
    except CaptureError:
        raise
    except Exception as error:
        with suppress(Exception):  # so that a write in a region without gradients is found too
            inline_modes(exported.graph, exported.graph_module)
        paths = exported.graph_signature.inputs_to_parameters
        for node, written in writes(exported.graph):
            if written.name in paths:
                raise CaptureError(
                    f"{operation(node)} writes a parameter in place each time that the module runs",
                    where=f"{paths[written.name].removeprefix(prefix)}, {source_line(node) or where}",
                    hint="change it once, before the capture, or compute a new tensor from it",
                ) from error
        raise refuse_export(error, where) from error


def _straight_line(exported: ExportedProgram) -> ExportedProgram:
    traced_again = casts_itself(exported.graph_module) or maps_itself(exported.graph_module)
    if traced_again:
        exported = exported.run_decompositions({})
    inline_modes(exported.graph, exported.graph_module)
    if not traced_again and not spell_in_place(exported.graph):
        exported = exported.run_decompositions({})
    return exported


def user_inputs(exported: ExportedProgram) -> list[str]:
    """Return the placeholders that stand for arguments, in the order of the arguments."""
    specs = exported.graph_signature.input_specs
    return [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]


def user_outputs(exported: ExportedProgram) -> list[fx.Node]:
    """Return the values that the exported module returns, in order; constants are left out."""
    values = exported.graph.output_node().args[0]
    assert isinstance(values, list | tuple)
    specs = exported.graph_signature.output_specs
    # By position: inlining gives values other names than the signature has.
    return [
        value
        for spec, value in zip(specs, values, strict=True)
        if spec.kind == OutputKind.USER_OUTPUT and isinstance(value, fx.Node)
    ]


def fingerprint(model: nn.Module, *, stored: torch.dtype | None = None) -> str:
    """Return a digest of class, ordered parameter paths, shapes, and a sample of each tensor.

    Values count as bfloat16 rounds them, so that a plan learned in bfloat16 fits the same decoder in float32.

    Args:
        stored: dtype that values are rounded to before; their own by default.
    """
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for path, tensor in model.named_parameters():
        digest.update(f"{path}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED_VALUES)
        if not tensor.is_meta:
            sample = flat[::step][:SAMPLED_VALUES]
            digest.update(sample.to("cpu", stored).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the module's tensors by path, each tied one under every path, sharing storage."""
    twins: dict[int, Tensor] = {}
    tensors = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        twins.setdefault(id(tensor), nn.Parameter(tensor.detach(), requires_grad=False))
        tensors[path] = twins[id(tensor)]
    for path, tensor in model.named_buffers(remove_duplicate=False):
        tensors[path] = tensor.detach()
    return tensors


def _ties(model: nn.Module) -> dict[str, str]:
    """Map each further path of a parameter that has several to its first path."""
    first: dict[int, str] = {}
    ties = {}
    for path, tensor in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(tensor), path) != path:
            ties[path] = first[id(tensor)]
    return ties


def _paths_read(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "get_attr"]


def _unlifted(
    exported: ExportedProgram,
    ties: Mapping[str, str],
    inputs: Mapping[str, str],
    outputs: Mapping[str, fx.Node],
    prefix: str,
) -> fx.Graph:
    """Return a graph with the named inputs first, in which tensors are `get_attr` nodes by path."""
    source = exported.graph
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    by_name = {node.name: node for node in source.nodes}
    graph, reads = fx.Graph(), {}
    copies = {by_name[old]: _input(graph, name, by_name[old]) for name, old in inputs.items()}
    for node in source.nodes:
        if node in copies or node.op == "output":
            continue
        if node.op == "placeholder":
            spec = specs[node.name]
            # torch.export lifts every tensor of the module, used or not.
            if spec.kind in _TENSOR_KINDS and node.users:
                assert spec.target is not None
                own_path = spec.target.removeprefix(prefix)
                path = ties.get(own_path, own_path)
                copies[node] = reads.get(path) or _read(graph, path, node)
                reads[path] = copies[node]
            elif spec.kind == InputKind.CUSTOM_OBJ and node.users:
                user = next(iter(node.users))
                raise CaptureError(
                    f"{operation(user)} takes an object that is no tensor, such as a torch.Generator",
                    where=source_line(user),
                    hint="compute its result once, and keep it as a buffer",
                )
            continue
        if node.op == "get_attr":
            raise CaptureError(
                f"a higher-order operation reads the sub-graph {node.target}",
                where=source_line(node),
                hint="control flow that depends on data cannot be pruned",
            )
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    _return(graph, [copies[node] for node in outputs.values()])
    graph.lint()
    return graph


def _input(graph: fx.Graph, name: str, placeholder: fx.Node) -> fx.Node:
    node = graph.placeholder(name.replace(".", "_"))
    node.meta = dict(placeholder.meta)
    return node


def _read(graph: fx.Graph, path: str, placeholder: fx.Node) -> fx.Node:
    node = graph.create_node("get_attr", path, name=path.replace(".", "_"))
    node.meta["val"] = placeholder.meta["val"]
    return node


def _return(graph: fx.Graph, values: Sequence[fx.Node]) -> None:
    """Return one value as it is, several as a tuple."""
    result = graph.output(values[0] if len(values) == 1 else tuple(values))
    result.meta["val"] = values[0].meta["val"]
