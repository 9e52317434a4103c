"""Capture with a cache: one graph for prefill and decode.

    logits, present = graph(input_ids, attention_mask, position_ids, past)

Entry points: `capture_cached` for a decoder that `dispfx.source.cached_forward` has prepared, and
`export_cached_program` for a rewritten graph.

1. The graph takes T new tokens after P cached ones, with batch, T and P free; P = 0 is prefill and
   T = 1 is decode.  It is traced at 3 × 13 tokens after 34, so that no two dynamic sizes are equal.
2. Keys and values are inputs and outputs by name: `past_key_values.N.key`, (B, heads, P, size), and
   `present.N.key`, (B, heads, P + T, size).  N is the layer's own number in the decoder's cache.
3. Parameters keep the decoder's own paths and the program has the decoder's own fingerprint, so a plan
   made on a capture without a cache lowers this one.
4. The graph runs at the traced shape, another one, prefill and a decode step, and every output must
   be what the module gives there.

Shape legend: B batch, T new tokens, P cached tokens, V vocabulary.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from dispfx.capturing.caches import nothing_remembered
from dispfx.capturing.graph_export import traced, user_frame
from dispfx.capturing.module_capture import (
    IDENTITY_TOLERANCE,
    Difference,
    difference,
    embedding_rows,
    evaluation,
    require_decoder,
)
from dispfx.capturing.module_state import module_kept
from dispfx.capturing.unlifting import program_of, straight_line, user_inputs, user_outputs
from dispfx.errors import CaptureError, first_line
from dispfx.ir.cached_inputs import CACHED_INPUTS, CachedShape, CacheTensor, cache_tensors, sample_inputs
from dispfx.ir.lengths import Lengths, hold_to
from dispfx.ir.program import Program

TRACED_SHAPE = CachedShape(batch=3, tokens=13, past=34)
OTHER_SHAPES = (CachedShape(2, 17, 5), CachedShape(2, 7, 0), CachedShape(1, 1, 9))
# The same for decoders of few positions.
FEW_TRACED_SHAPE = CachedShape(batch=3, tokens=7, past=6)
FEW_OTHER_SHAPES = (CachedShape(2, 11, 4), CachedShape(2, 5, 0), CachedShape(1, 1, 9))
# For a single token, or with nothing cached, a decoder may choose other kernels than the graph, which was
# traced with several tokens after cached ones, so sums run in another order: one rounding a step, a few
# ten steps.
STEP_TOLERANCE = 1e-5
STEP_ROUNDINGS = 20


@dataclass(frozen=True, eq=False)
class CachedForward:
    """A decoder whose forward pass takes its cache as plain tensors.

    Args:
        module: forward(input_ids (B, T), attention_mask (B, P + T), position_ids (B, T), past) ->
            [logits (B, T, V), *present]; `past` and `present` are lists of tensors, in the order of
            `caches`.  Its only sub-module is `decoder`.
        decoder: the decoder itself.
        name: of the attribute of `module` that holds the decoder.
        caches: what each tensor of the cache is.
    """

    module: nn.Module
    decoder: nn.Module
    name: str
    caches: tuple[CacheTensor, ...]


def traced_shape(context: int | None) -> CachedShape:
    """Return the sizes that a decoder is traced at, which has so many positions where that is known."""
    few = context is not None and context < TRACED_SHAPE.tokens + TRACED_SHAPE.past
    return FEW_TRACED_SHAPE if few else TRACED_SHAPE


def capture_cached(
    forward: CachedForward, *, vocabulary_size: int | None = None, context: int | None = None
) -> Program:
    """Return the graph of a decoder with its cache; the decoder itself is not changed.

    Args:
        forward: the prepared decoder.
        vocabulary_size: ids are drawn below it; by default taken from the input embedding.
        context: how many positions the decoder has; it is traced within them.

    Raises:
        CaptureError: if the decoder cannot be exported with a cache, works at some shapes only, or the
            graph differs from the decoder by more than `IDENTITY_TOLERANCE` (`step_tolerance` for a
            single token).
    """
    decoder = forward.decoder
    require_decoder(decoder)
    vocabulary = vocabulary_size or embedding_rows(decoder)
    device = next(decoder.parameters()).device
    found: dict[tuple[int, ...], Difference] = {}
    traced_at = traced_shape(context)
    others = OTHER_SHAPES if traced_at == TRACED_SHAPE else FEW_OTHER_SHAPES
    with evaluation(decoder, use_cache=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = sample_inputs(forward.caches, traced_at, vocabulary, device)
        _run(forward, sample, traced_at)
        straight = straight_line(_export(forward, sample), type(decoder).__name__, f"{forward.name}.")
        program = _program_of(straight, forward)
        for shape in (traced_at, *others):
            inputs = sample_inputs(forward.caches, shape, vocabulary, device)
            found[shape] = _identity(program, forward, inputs, shape)
    program.identity = found
    return program


def export_cached_program(module: fx.GraphModule, *, context: int | None = None) -> ExportedProgram:
    """Return the graph of a cached program as an `ExportedProgram`, dynamic in B, T and P.

    Args:
        module: the graph module of a cached program, lowered or not.  The exported program takes its
            inputs by position and returns a tuple of its outputs.
        context: as for `capture_cached`.
    """
    hold_to(module, Lengths())  # A bound that is asked in a trace may not stand on a size with a name.
    caches = cache_tensors(module.graph)
    device = next(module.parameters()).device
    rows = 2  # Only the sizes matter here.
    inputs = sample_inputs(caches, traced_shape(context), rows, device)
    batch, sequence, past = Dim("batch"), Dim("sequence"), Dim("past_sequence")
    shapes = (
        {0: batch, 1: sequence},
        {0: batch, 1: Dim.AUTO},
        {0: batch, 1: sequence},
        *({0: batch, 2: past} for _ in caches),
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return traced(module, inputs, shapes, prefer_deferred_runtime_asserts_over_guards=True)


def _run(forward: CachedForward, inputs: tuple[Tensor, ...], shape: CachedShape) -> list[Tensor]:
    try:
        return forward.module(*_grouped(inputs))
    except Exception as error:
        raise CaptureError(
            f"the decoder must take {shape.tokens} tokens after {shape.past} cached ones; it raised "
            f"{first_line(error)}",
            where=user_frame(error) or type(forward.decoder).__name__,
            hint="a capture without a cache may still work",
        ) from error


def _grouped(inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the arguments of a `CachedForward` module: the caches in one list."""
    first = len(CACHED_INPUTS)
    return (*inputs[:first], list(inputs[first:]))


def _export(forward: CachedForward, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    rows = {0: Dim.AUTO, 1: Dim.AUTO}
    shapes = (rows, rows, rows, [{0: Dim.AUTO, 2: Dim.AUTO} for _ in forward.caches])
    try:
        with module_kept(forward.decoder, values=False), nothing_remembered(forward.decoder):
            return traced(
                forward.module, _grouped(inputs), shapes, prefer_deferred_runtime_asserts_over_guards=True
            )
    except Exception as error:
        raise CaptureError(
            f"torch.export cannot capture this decoder with its cache: {first_line(error)}",
            where=user_frame(error) or type(forward.decoder).__name__,
            hint="a capture without a cache may still work",
        ) from error


def _program_of(exported: ExportedProgram, forward: CachedForward) -> Program:
    names = [*CACHED_INPUTS, *(cache.past for cache in forward.caches)]
    inputs = dict(zip(names, user_inputs(exported), strict=True))
    returned = ["logits", *(cache.present for cache in forward.caches)]
    values = user_outputs(exported)
    if len(values) != len(returned):
        raise CaptureError(
            f"a cached graph returns {len(returned)} tensors, this one {len(values)}",
            where=type(forward.decoder).__name__,
        )
    outputs = dict(zip(returned, values, strict=True))
    return program_of(exported, forward.decoder, inputs, outputs, prefix=f"{forward.name}.")


def _identity(
    program: Program, forward: CachedForward, inputs: tuple[Tensor, ...], shape: CachedShape
) -> Difference:
    """Return how far the graph's logits are from the decoder's; raise where any output is not close."""
    expected = _run(forward, inputs, shape)
    try:
        actual = program.graph_module(*inputs)
    except Exception as error:
        raise CaptureError(
            f"the cached graph does not run for {shape.tokens} tokens after {shape.past} cached ones: "
            f"{first_line(error)}",
            where=type(forward.decoder).__name__,
            hint="the length is fixed somewhere in the decoder; a capture without a cache may still work",
        ) from error
    found = dict(zip(program.outputs, map(difference, actual, expected), strict=True))
    tolerance = (
        IDENTITY_TOLERANCE if shape in (TRACED_SHAPE, FEW_TRACED_SHAPE) else step_tolerance(program.dtype)
    )
    _require_close(found, shape, tolerance, type(forward.decoder).__name__)
    return found["logits"]


def step_tolerance(dtype: torch.dtype) -> float:
    """Return how far another order of sums may move what the decoder gives."""
    return max(STEP_TOLERANCE, STEP_ROUNDINGS * torch.finfo(dtype).eps)


def _require_close(found: Mapping[str, Difference], shape: CachedShape, tolerance: float, where: str) -> None:
    for name, between in found.items():
        if not between.relative <= tolerance:
            raise CaptureError(
                f"the cached graph must give what the decoder gives within {tolerance:g}; {name} "
                f"differs by {between.relative:.2e} for {shape.tokens} tokens after {shape.past} cached ones",
                where=where,
            )
