"""Capture: an `nn.Module` becomes a `Program`.  The only file that knows `torch.export.export`.

Entry points: `capture` for a decoder, `export_program` for a rewritten graph.

How a decoder becomes a graph:
1. It is exported in evaluation mode and without gradients at 3 × 13 tokens: two primes, so that a
   dimension of a reshape can be told by its size.
2. In-place operations are made functional.
3. Parameters, buffers and constants become `get_attr` nodes under their own paths; tied parameters
   become one.  Token ids stay the only input and logits the only output.
4. The graph runs at the traced and at another shape and must give what the module gives there,
   because `Dim.AUTO` may fix a dimension without saying so.
"""

import hashlib
import inspect
import math
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from dispfx.errors import CaptureError
from dispfx.ir.inline import inline_modes
from dispfx.ir.ops import source_line
from dispfx.ir.program import Program, with_tensors

TRACED_SHAPE = (3, 13)
OTHER_SHAPE = (2, 17)
IDENTITY_TOLERANCE = 1e-6
SAMPLED_VALUES = 64

_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def capture(model: nn.Module, *, vocabulary_size: int | None = None) -> Program:
    """Return the graph of a decoder; the decoder itself is not changed.

    Args:
        model: takes token ids (B, T) int64 first and returns logits (B, T, V), or an output that
            holds them.
        vocabulary_size: ids are drawn below it; by default taken from the input embedding.

    Raises:
        CaptureError: if the module cannot be exported, works at one shape only, or the graph
            differs from the module by more than `IDENTITY_TOLERANCE`.
    """
    _require_decoder(model)
    vocabulary = vocabulary_size or _embedding_rows(model)
    with _evaluation(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _fixed_arguments(model)
        ids = _token_ids(model, vocabulary, TRACED_SHAPE)
        expected = _logits_of(_run(model, ids, arguments), ids)
        exported = _functional(_export(model, ids, arguments))
        program = _program_of(exported, model, expected.shape[-1])
        program.identity = {
            shape: _identity(program, model, _token_ids(model, vocabulary, shape), arguments)
            for shape in (TRACED_SHAPE, OTHER_SHAPE)
        }
    return program


def export_program(module: fx.GraphModule, ids: Tensor) -> ExportedProgram:
    """Return a graph module as an `ExportedProgram` with dynamic batch and length.

    Args:
        module: forward(ids) -> logits.
        ids: (B, T) sample token ids with B, T >= 2.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (ids,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},), strict=False)


def module_logits(model: nn.Module, ids: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the logits (B, T, V) that a decoder gives for token ids (B, T), without a cache.

    Args:
        tensors: values to use in place of the module's own, by path; the module is not changed.

    Raises:
        CaptureError: if the module raises, or returns no logits.
    """
    arguments = _fixed_arguments(model)
    if tensors is None:
        return _logits_of(_run(model, ids, arguments), ids)
    return _logits_of(torch.func.functional_call(model, dict(tensors), (ids,), arguments), ids)


@dataclass(frozen=True)
class Difference:
    """max|a − b|, and the same over max|b|."""

    absolute: float
    relative: float


def fingerprint(model: nn.Module) -> str:
    """Return a digest of class, ordered parameter paths, shapes, and a sample of each tensor."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for path, tensor in model.named_parameters():
        digest.update(f"{path}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED_VALUES)
        if not tensor.is_meta:
            digest.update(flat[::step][:SAMPLED_VALUES].to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def _require_decoder(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a decoder is a torch.nn.Module, this is a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise CaptureError("a decoder has parameters, this module has none", where=type(model).__name__)


def _embedding_rows(model: nn.Module) -> int:
    """Return the number of tokens: the rows of the embedding that comes first in the module."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    shapes = [tensor.shape for _, tensor in model.named_parameters() if tensor.dim() == 2]
    if not shapes:
        raise CaptureError("no embedding was found in the module", where=type(model).__name__)
    return int(shapes[0][0])


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Hold the module in evaluation mode and put every training flag back after."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in flags.items():
            module.training = training


def _fixed_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments that make a forward pass stateless."""
    accepted = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in accepted else {}


def _token_ids(model: nn.Module, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    low = min(4, vocabulary - 1)
    ids = torch.randint(low, vocabulary, shape, generator=generator)
    return ids.to(next(model.parameters()).device)


def _run(model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> Any:
    try:
        return model(ids, **arguments)
    except Exception as error:
        raise CaptureError(
            f"the module must take token ids of shape {tuple(ids.shape)}; it raised "
            f"{type(error).__name__}: {_first_line(error)}",
            where=type(model).__name__,
            hint="wrap the decoder in a module whose forward takes token ids first",
        ) from error


def _logits_of(output: Any, ids: Tensor) -> Tensor:
    """Return the logits in a module's output: its first float tensor of shape (B, T, V)."""
    leaves = pytree.tree_leaves(output)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:-1] == ids.shape:
            return leaf
    shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    raise CaptureError(
        f"logits of shape {(*ids.shape, 'V')} were expected, the module returns tensors of {shapes}",
        hint="use a causal language model with its head",
    )


def _export(model: nn.Module, ids: Tensor, arguments: dict[str, Any]) -> ExportedProgram:
    dynamic = ({0: Dim.AUTO, 1: Dim.AUTO},)
    parameters = list(inspect.signature(model.forward).parameters)
    shapes: Any = {parameters[0]: dynamic[0], **dict.fromkeys(arguments)} if arguments else dynamic
    try:
        return torch.export.export(model, (ids,), arguments, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot capture this module: {type(error).__name__}: {_first_line(error)}",
            where=_user_frame(error) or type(model).__name__,
            hint="run again with --debug for the whole report of torch.export",
        ) from error


def _functional(exported: ExportedProgram) -> ExportedProgram:
    """Replace in-place operations by functional ones, where there are any."""
    if not any(_mutates(node) for node in exported.graph.nodes):
        return exported
    return exported.run_decompositions({})


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _program_of(exported: ExportedProgram, model: nn.Module, vocabulary: int) -> Program:
    own = _own_tensors(model)
    ties = _ties(model)
    tensors = {**own, **{name: value for name, value in exported.constants.items() if name not in own}}
    graph = _unlifted(exported, ties, vocabulary)
    graph_module = with_tensors(graph, {path: tensors[path] for path in _paths_read(graph)})
    read = dict(graph_module.named_parameters()) | dict(graph_module.named_buffers())
    return Program(
        graph_module,
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        fingerprint=fingerprint(model),
        ties=ties,
        unused={path: tensor for path, tensor in own.items() if path not in read and path not in ties},
    )


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


def _unlifted(exported: ExportedProgram, ties: Mapping[str, str], vocabulary: int) -> fx.Graph:
    """Return a graph from token ids to logits in which tensors are `get_attr` nodes by path."""
    source = exported.graph
    inline_modes(source, exported.graph_module)
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    graph, copies, reads = fx.Graph(), {}, {}
    ids = next(name for name, spec in specs.items() if spec.kind == InputKind.USER_INPUT)
    ordered = [node for node in source.nodes if node.name == ids]
    ordered += [node for node in source.nodes if node.name != ids and node.op != "output"]
    for node in ordered:
        if node.op == "placeholder" and node.name != ids:
            spec = specs[node.name]
            if spec.kind in _TENSOR_KINDS:
                assert spec.target is not None
                path = ties.get(spec.target, spec.target)
                copies[node] = reads.get(path) or _read(graph, path, node)
                reads[path] = copies[node]
            continue
        if node.op == "get_attr":
            raise CaptureError(
                f"a higher-order operation reads the sub-graph {node.target}",
                where=source_line(node),
                hint="control flow that depends on data cannot be pruned",
            )
        copies[node] = graph.node_copy(node, lambda old: copies[old])
    logits = _logits_node(exported, vocabulary)
    graph.output(copies[logits])
    graph.output_node().meta["val"] = logits.meta["val"]
    graph.lint()
    return graph


def _read(graph: fx.Graph, path: str, placeholder: fx.Node) -> fx.Node:
    node = graph.create_node("get_attr", path, name=path.replace(".", "_"))
    node.meta["val"] = placeholder.meta["val"]
    return node


def _logits_node(exported: ExportedProgram, vocabulary: int) -> fx.Node:
    user = {
        spec.arg.name
        for spec in exported.graph_signature.output_specs
        if spec.kind == OutputKind.USER_OUTPUT and hasattr(spec.arg, "name")
    }
    for node in exported.graph.output_node().args[0]:  # type: ignore[union-attr]
        value = node.meta.get("val") if isinstance(node, fx.Node) and node.name in user else None
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[-1] == vocabulary:
            return node  # type: ignore[return-value]
    raise CaptureError("the graph does not return the logits that the module returns")


def _identity(program: Program, model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> Difference:
    """Return how far the graph is from the module at these ids; raise where it is not close."""
    expected = _logits_of(_run(model, ids, arguments), ids)
    try:
        actual = program.graph_module(ids)
    except Exception as error:
        raise CaptureError(
            f"the graph traced at {TRACED_SHAPE} tokens does not run at {tuple(ids.shape)}: "
            f"{_first_line(error)}",
            where=type(model).__name__,
            hint="a loop over time fixes the length; such a decoder cannot be compiled",
        ) from error
    found = _difference(actual, expected)
    if not found.relative <= IDENTITY_TOLERANCE:
        raise CaptureError(
            f"the graph must give the module's logits within {IDENTITY_TOLERANCE:g}, "
            f"at {tuple(ids.shape)} tokens it differs by {found.relative:.2e}",
            where=type(model).__name__,
        )
    return found


def _difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare logits; infinite where shapes differ or a value is not finite."""
    if actual.shape != expected.shape or not bool(expected.isfinite().all() & actual.isfinite().all()):
        return Difference(math.inf, math.inf)
    absolute = float((actual.double() - expected.double()).abs().max())
    largest = float(expected.double().abs().max())
    return Difference(absolute, absolute / largest if largest else absolute)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _user_frame(error: Exception) -> str | None:
    """Return the innermost frame outside torch, as file:line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if "/torch/" not in f.filename and not f.filename.endswith("dispfx/capturing.py")
    ]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
