"""From a lowered graph to an ONNX model in memory: export, repair, legalize.

Entry points: `cached_model` for a program with a cache, `full_sequence_model` for a graph without one, and
`require_translations`, which asks before learning whether the exporter knows every operation.
"""

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from dispfx.capturing.cached_capture import export_cached_program
from dispfx.deploy.exported import export_program
from dispfx.deploy.onnx.legalize import PLAIN, Flavor, legalize
from dispfx.deploy.onnx.lifting import lifted
from dispfx.deploy.onnx.one_of_each import one_of_each
from dispfx.deploy.onnx.tidying import tidy
from dispfx.errors import UnsupportedGraphError, first_line
from dispfx.ir.ops import operation, source_line
from dispfx.ir.program import Program
from dispfx.settings.field import field_of
from dispfx.settings.verb_settings import FormSettings
from dispfx.words.option_names import option

OPSET = FormSettings.opset

_ROWS = {0: "batch", 1: "sequence"}
_MASK = {0: "batch", 1: "total_sequence"}
_PAST = {0: "batch", 2: "past_sequence"}
_PRESENT = ("batch", None, "total_sequence", None)


def cached_model(program: Program, *, opset: int = OPSET, flavor: Flavor = PLAIN) -> ir.Model:
    """Return the ONNX model of a lowered program with a cache.

    Inputs and outputs have the program's names.  Free sizes are `batch`, `sequence` (new tokens),
    `past_sequence` and `total_sequence`, their sum.

    Args:
        opset: version of the standard operator set.
        flavor: what the model is for.

    Raises:
        UnsupportedGraphError: if the exporter has no ONNX form for an operation, or does not know the set.
    """
    module = program.graph_module
    dims = (_ROWS, _MASK, _ROWS, *[_PAST] * (len(program.inputs) - 3))
    signature = _Signature(program.inputs, program.outputs, dims)
    with silence():
        model = _translated(
            module, lambda: export_cached_program(module, context=program.context), signature, opset
        )
        tidy(model)
        legalize(model, flavor)
    for value in model.graph.outputs[1:]:
        assert value.shape is not None
        value.shape = ir.Shape([name or size for name, size in zip(_PRESENT, value.shape, strict=True)])
    return model


def full_sequence_model(lowered: fx.GraphModule, sample_ids: Tensor, *, opset: int = OPSET) -> ir.Model:
    """Return the ONNX model of a graph from `input_ids` (batch, sequence) to `logits`.

    Args:
        sample_ids: (B, T), both at least 2, on the decoder's device.
        opset: version of the standard operator set.

    Raises:
        UnsupportedGraphError: as `cached_model`.
    """
    signature = _Signature(("input_ids",), ("logits",), (_ROWS,))
    with silence():
        model = _translated(lowered, lambda: export_program(lowered, sample_ids), signature, opset)
        tidy(model)
        legalize(model)
    return model


def require_translations(lowered: fx.GraphModule, sample_ids: Tensor) -> None:
    """Pass if the exporter has an ONNX form for every operation of a graph without a cache.

    Operations of one kind are translated once, so that it takes no longer for a deeper decoder.

    Args:
        lowered: with weights, or with parameters on the meta device; it is not changed.
        sample_ids: as for `full_sequence_model`.

    Raises:
        UnsupportedGraphError: naming the operation and its line.
    """
    few = one_of_each(lowered, sample_ids.device)
    outputs = [f"output_{index}" for index in range(len(few.graph.output_node().args[0]))]  # type: ignore[arg-type]
    with silence():
        signature = _Signature(("input_ids",), outputs, (_ROWS,))
        _translated(few, lambda: export_program(few, sample_ids), signature, OPSET)


@dataclass(frozen=True)
class _Signature:
    """Names of a model's inputs and outputs, and of the free sizes of each input."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    dims: tuple[dict[int, str], ...]


def _translated(
    module: fx.GraphModule, traced: Callable[[], ExportedProgram], signature: _Signature, opset: int
) -> ir.Model:
    """Translate a graph as it is; one with operations that are unknown in ONNX is decomposed first.

    Args:
        traced: returns the graph traced again, which can be decomposed; both take most of an export's time.
    """
    field_of(FormSettings, "opset").require(opset)
    try:
        return _converted(lifted(module), signature, opset)
    except torch.onnx.errors.OnnxExporterError:
        pass
    try:
        return _converted(traced(), signature, opset)
    except torch.onnx.errors.OnnxExporterError as error:
        raise _no_translation(error) from error


def _converted(exported: ExportedProgram, signature: _Signature, opset: int) -> ir.Model:
    program = torch.onnx.export(
        exported,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=signature.dims,
        input_names=list(signature.inputs),
        output_names=list(signature.outputs),
        optimize=False,
        verbose=False,
    )
    assert program is not None
    return program.model


def _no_translation(error: BaseException) -> UnsupportedGraphError:
    node = _node_of(error)
    said = first_line(error) if node is None else f"it has no ONNX form for {_written(node)}{_of_type(node)}"
    return UnsupportedGraphError(
        f"the ONNX exporter cannot translate this decoder: {said}",
        where=None if node is None else source_line(node),
        hint=f"compile with {option('export', 'none')}, or {option('export', 'pt2')}",
    )


def _written(node: fx.Node) -> str:
    """Return the operation as the module has it, not what it was decomposed into."""
    original = node.meta.get("original_aten")
    return operation(node) if original is None else str(getattr(original, "overloadpacket", original))


def _of_type(node: fx.Node) -> str:
    """Return the type of complex operands, whose operations have no form that those of real ones have."""
    values = [value.meta.get("val") for value in (node, *node.all_input_nodes)]
    types = [value.dtype for value in values if isinstance(value, Tensor) and value.is_complex()]
    return f" of {str(types[0]).removeprefix('torch.')} numbers" if types else ""


def _node_of(error: BaseException) -> fx.Node | None:
    """Return the node that the exporter was at; its errors have it in their frames alone."""
    found = None
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            at = frame.f_locals.get("node")
            found = at if isinstance(at, fx.Node) else found
        cause = cause.__cause__
    return found


@contextmanager
def silence() -> Iterator[None]:
    """Keep the exporter's warnings and log lines, which concern its own insides, off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
