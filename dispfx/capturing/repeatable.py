"""A decoder gives the same logits each time that it runs on the same tokens.

Entry point: `require_repeatable`, and `require_same_again` for one more look.

1. An operation that draws numbers and that the logits depend on is found in the graph, with its line.
2. A buffer or parameter that a call changes and that the logits of the next call depend on is found in the
   graph too, and so is a tensor that the module holds in an attribute, a dict, a list or another object.  A
   write that the logits do not read is fine, and so is a buffer that is overwritten before it is read.
3. What no graph shows, such as a counter in Python, is found by calling the module several times.

A graph has what the first call computes, so a change that begins later would be lost silently.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from dispfx.capturing.module_state import held_tensors
from dispfx.capturing.rounding_noise import most_allowed
from dispfx.errors import CaptureError
from dispfx.ir.logit_errors import logit_errors
from dispfx.ir.ops import operation, source_line
from dispfx.ir.program import Program

_REPEATS = 4
_HINT = "in evaluation mode nothing may be random, and nothing may depend on earlier calls"
# An operation with one of these draws nothing if the value is 0 or False.
_SWITCHES = ("p", "dropout_p", "train", "training")
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
# What a buffer may hold after many calls.  No sum hides NaN, and no comparison with a count a large number.
_WHOLE = (2**30, -(2**30), 1000, 0)
_REAL = (float("nan"), 1e4, -1e4)


def written_tensors(
    exported: ExportedProgram, prefix: str, model: nn.Module, run: Callable[[], object]
) -> dict[str, str]:
    """Return the tensors that a call writes: path in the graph -> path in the module.

    These are what the export says is written, and what a call is seen to change.
    An assignment does not count as a write in an exported graph.  A tensor that is no buffer has another name
    there, and is found by its memory.

    Args:
        exported: made straight by `dispfx.capturing.unlifting.straight_line`.
        prefix: what the exported module puts in front of the decoder's own paths.
        run: calls the module, which has already made what it makes on first use.
    """
    constants = {path.removeprefix(prefix): tensor for path, tensor in exported.constants.items()}
    found = {path: path for path in _said_to_be_written(exported, prefix)}
    for path, tensor in _changed_tensors(model, run).items():
        alike = [name for name, constant in constants.items() if _is_same(constant, tensor)]
        found |= dict.fromkeys((path, *alike), path)
    return found


def _said_to_be_written(exported: ExportedProgram, prefix: str) -> set[str]:
    return {
        spec.target.removeprefix(prefix)
        for spec in exported.graph_signature.output_specs
        if spec.kind in _MUTATIONS and spec.target is not None
    }


def _changed_tensors(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Return the tensors that a call changes or replaces, as they are before it."""
    before = _held(model)
    values = {path: tensor.detach().clone() for path, tensor in before.items()}
    run()
    after = _held(model)
    return {
        path: tensor
        for path, tensor in {**after, **before}.items()
        if path not in before or path not in after or not _same_values(after[path], values[path])
    }


def _held(model: nn.Module) -> dict[str, Tensor]:
    # A module of very many parts is walked through in part only, and its buffers count all the same.
    return {**dict(held_tensors(model)), **dict(model.named_buffers())}


def _is_same(constant: object, tensor: Tensor) -> bool:
    """Whether a constant of a graph has the memory of a tensor."""
    return (
        isinstance(constant, Tensor)
        and constant.shape == tensor.shape
        and constant.dtype == tensor.dtype
        and constant.device == tensor.device
        and constant.data_ptr() == tensor.data_ptr()
    )


def _same_values(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def require_repeatable(
    program: Program, written: Mapping[str, str], ids: Tensor, run: Callable[[], Tensor], first: Tensor
) -> None:
    """Pass if the logits depend on nothing that is random, and on no earlier call.

    Args:
        program: of the module.
        written: as of `written_tensors`.
        ids: (B, T) token ids.
        run: returns the module's logits (B, T, V) for them.
        first: what `run` returned before.

    Raises:
        CaptureError: with the operation, the buffer or the module.
    """
    _require_nothing_drawn(program)
    _require_nothing_kept(program, written, ids)
    require_same_again(program, run, first, _REPEATS)


def _require_nothing_drawn(program: Program) -> None:
    for node in _read_by_logits(program.graph_module.graph):
        if _draws(node):
            raise CaptureError(
                f"{operation(node)} draws other numbers each time that the module runs",
                where=source_line(node),
                hint=_HINT,
            )


def _require_nothing_kept(program: Program, written: Mapping[str, str], ids: Tensor) -> None:
    read = [str(node.target) for node in _read_by_logits(program.graph_module.graph) if node.op == "get_attr"]
    for path in sorted({*read} & written.keys()):
        if _matters(program.graph_module, path, ids):
            kind = "parameter" if path in program.parameters else "buffer"
            raise CaptureError(
                f"the logits depend on a {kind} that each call changes, so they depend on earlier calls",
                where=written[path],
                hint=_HINT,
            )


def require_same_again(program: Program, run: Callable[[], Tensor], first: Tensor, times: int = 1) -> None:
    """Pass if a module gives the same bits again; on a GPU, which may sum in another order, within rounding.

    Logits that are not finite pass, because another check names them.

    Args:
        run, first: as for `require_repeatable`.
        times: calls of the module.

    Raises:
        CaptureError: if it does not.
    """
    allowed = 0.0 if first.device.type == "cpu" else most_allowed(program.parameters.values())
    if not bool(first.isfinite().all()):
        return
    for _ in range(times):
        again = run()
        if again.shape != first.shape or not logit_errors(first, again)[1] <= allowed:
            raise CaptureError(
                "the module gives other logits each time that it runs on the same tokens",
                where=program.model_class.rpartition(".")[2],
                hint=_HINT,
            )


def _read_by_logits(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that the first output of a graph depends on."""
    seen: set[fx.Node] = set()
    waiting = [graph.output_node()]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    yield from (node for node in graph.nodes if node in seen)


def _draws(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in _SWITCHES:
            default = argument.default_value if argument.has_default_value() else None
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, default)
            if given in (0, False):
                return False
    return True


def _matters(graph_module: fx.GraphModule, path: str, ids: Tensor) -> bool:
    """Whether a graph gives other logits for other values in a tensor, or cannot run with them."""
    held = dict(graph_module.named_parameters()) | dict(graph_module.named_buffers())
    before = graph_module(ids)
    for value in _other_values(held[path].dtype):
        other = {path: torch.full_like(held[path], value)}
        try:
            after = torch.func.functional_call(graph_module, other, (ids,))
        except (RuntimeError, IndexError):
            return True  # such as a place outside of a table
        if not torch.equal(before, after):
            return True
    return False


def _other_values(dtype: torch.dtype) -> tuple[float, ...]:
    if dtype.is_floating_point or dtype.is_complex:
        return _REAL
    if dtype is torch.bool:
        return (True, False)
    limits = torch.iinfo(dtype)
    return tuple(min(max(value, limits.min), limits.max) for value in _WHOLE)
