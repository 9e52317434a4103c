"""The comparisons of every compile, before an output folder appears.

    captured = model     the graph computes what the module computes        (checked by the capture)
    identity             with everything kept, the gated graph is bit-identical to the captured graph
    lowered = gated      smaller weights compute what the masks computed
    lowered = zeroed     and what the user's module computes with the removed weights set to zero: this one
                         shares no graph, gate or index with the compiler.  Left out if one selection holds
                         for the whole stream, because the module's norms would divide by the full width
    removed is unread    with noise in place of the removed weights, the gated graph gives the same bits:
                         kept features do not depend on removed ones
    gather-add = lowered
    modules = lowered    the transformers model with smaller modules computes what the lowered graph computes
    reloaded = modules   read back from disk; reloaded = lowered if there is only a graph
    dense = lowered      the full-size checkpoint with zeros, read back, if requested
    onnx = checkpoint    on ONNX Runtime's CPU provider
    program.pt2 = checkpoint, if both are written

    modules = zeroed     one token outside of the lengths for which the graph holds, if its arithmetic changes
                         there and the config allows such sequences

All except the first run at two batch sizes and lengths that were not traced.  Comparisons of forms that are
not graphs of the compiler also run at the longest sequence of the run, if the capture was compared there.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.compiler.programs import gate, gated, lower
from dispfx.deploy.exported import load_program
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.verification.equivalence import (
    SHAPES_BT,
    TOLERANCES,
    ModuleDecoder,
    Verification,
    compare_decoders,
    shapes_up_to,
)

Shapes = Sequence[tuple[int, int]]


def tolerance_of(program: Program) -> float:
    """Return the relative error that another order of sums may cause, in the least precise dtype.

    A decoder of float64 may compute a norm in float32, for example.
    """
    values = {getattr(node.meta.get("val"), "dtype", None) for node in program.graph.nodes}
    own = {tensor.dtype for tensor in program.parameters.values()}
    return _widest(own | values & {torch.float32})


def tolerance_of_module(module: nn.Module) -> float:
    """Return the same for a module, by its parameters alone."""
    return _widest({one.dtype for one in module.parameters()})


def _widest(dtypes: set[Any]) -> float:
    return max((TOLERANCES[one] for one in dtypes if one in TOLERANCES), default=TOLERANCES[torch.float32])


def captured_lines(program: Program) -> list[Verification]:
    """Return the comparisons of the capture with the module."""
    return [
        Verification("captured = model", shape, error.absolute, error.relative, error.allowed)
        for shape, error in program.identity.items()
    ]


def compared_shapes(program: Program) -> tuple[tuple[int, int], ...]:
    """Return the shapes of every comparison, with the longest sequence that the capture was compared on."""
    longest = max((shape[1] for shape in program.identity if len(shape) == 2), default=0)
    return shapes_up_to(program.lengths.most, longest)


def short_shapes(program: Program) -> tuple[tuple[int, int], ...]:
    """Return the short shapes of every comparison."""
    return shapes_up_to(program.lengths.most)


def identity_lines(program: Program) -> list[Verification]:
    """Compare the gated graph, with masks of ones, with the captured graph: equal bits."""
    decoder = gate(program)
    ones = [torch.ones(site.size, device=program.device) for site in program.sites]
    return _compare("identity", program, program.graph_module, lambda ids: decoder(ids, ones), tolerance=0.0)


def lowered_lines(
    program: Program, plan: Plan, lowered: nn.Module, model: nn.Module | None
) -> list[Verification]:
    """Compare the lowered decoder with the gated one, the zeroed module, and its fast form."""
    tolerance = tolerance_of(program)
    hard = gated(program, plan)
    lines = _compare("lowered = gated", program, hard, lowered, tolerance)
    if model is not None:
        lines += zeroed_lines(program, plan, lowered, model, compared_shapes(program))
    lines += unread_lines(program, plan, hard)
    fast = lower(program, plan, write="gather-add")
    return lines + _compare("gather-add = lowered", program, lowered, fast, tolerance)


def zeroed_lines(
    program: Program, plan: Plan, lowered: nn.Module, model: nn.Module, shapes: Shapes
) -> list[Verification]:
    """Compare the lowered decoder with the zeroed module; nothing if one selection holds for the stream."""
    if plan.select != "after-norm":
        return []
    zeroed = zeroed_decoder(program, plan, model)
    return _compare("lowered = zeroed", program, zeroed, lowered, tolerance_of(program), shapes)


def module_lines(
    program: Program, lowered: nn.Module, modules: nn.Module, *, shapes: Shapes | None = None
) -> list[Verification]:
    """Compare the decoder built from smaller modules with the lowered graph."""
    logits = ModuleDecoder(modules)
    shapes = shapes or compared_shapes(program)
    return _compare("modules = lowered", program, lowered, logits, tolerance_of(program), shapes)


def outside_lines(program: Program, plan: Plan, model: nn.Module, modules: nn.Module) -> list[Verification]:
    """Compare smaller modules with the zeroed decoder one token outside of the graph's valid lengths."""
    lengths, claimed = program.lengths, program.context
    tokens = [lengths.least - 1] if lengths.least > 1 else []
    if lengths.most is not None and not lengths.limit and claimed is not None and claimed > lengths.most:
        tokens.append(lengths.most + 1)
    if not tokens or plan.select != "after-norm" or program.dense_statistics:
        return []
    zeroed = ModuleDecoder(model, zeroed_tensors(program, plan))
    logits = ModuleDecoder(modules)
    shapes = [(1, length) for length in tokens]
    return _compare("modules = zeroed", program, zeroed, logits, tolerance_of(program), shapes)


def dense_lines(program: Program, lowered: nn.Module, dense: nn.Module) -> list[Verification]:
    """Compare a full-size checkpoint with zeros, read back from disk, with the lowered decoder."""
    logits = ModuleDecoder(dense)
    shapes = compared_shapes(program)
    return _compare("dense = lowered", program, lowered, logits, tolerance_of(program), shapes)


def reloaded_lines(
    name: str, program: Program, written: nn.Module, reloaded: nn.Module
) -> list[Verification]:
    """Compare the decoder read back from disk with the written one: equal bits."""
    logits = [ModuleDecoder(module) for module in (written, reloaded)]
    shapes = compared_shapes(program)
    return _compare(f"reloaded = {name}", program, *logits, tolerance=0.0, shapes=shapes)


def exported_lines(
    folder: Path, decoder: nn.Module, vocabulary_size: int, shapes: Shapes = SHAPES_BT
) -> list[Verification]:
    """Compare a folder's exported program, as read from disk, with the decoder of its checkpoint."""
    parameter = next(decoder.parameters())
    return compare_decoders(
        "program.pt2 = checkpoint",
        decoder,
        load_program(folder),
        tolerance_of_module(decoder),
        vocabulary_size=vocabulary_size,
        shapes=shapes,
        device=parameter.device,
    )


def zeroed_decoder(program: Program, plan: Plan, model: nn.Module) -> nn.Module:
    """Return the user's module with zeros for removed weights.

    A module that scales a weight by a statistic of the whole weight would scale the kept part differently.
    The captured graph, which holds the dense decoder's statistics, then replaces it.
    """
    tensors = zeroed_tensors(program, plan)
    if not program.dense_statistics:
        return ModuleDecoder(model, tensors)
    twin = program.clone()
    twin.rebuild({**dict(program.tensors()), **tensors})
    return twin.graph_module


def unread_lines(program: Program, plan: Plan, hard: nn.Module) -> list[Verification]:
    """Compare the decoder gated by the plan with and without noise in removed weights: equal bits."""
    twin = program.clone()
    twin.rebuild({**dict(program.tensors()), **noisy_tensors(program, plan)})
    return _compare("removed is unread", program, hard, gated(twin, plan), tolerance=0.0)


def zeroed_tensors(program: Program, plan: Plan) -> dict[str, Tensor]:
    """Return every tensor that the plan cuts, at full size with zeros at removed positions, by path."""
    return _refilled(program, plan, torch.zeros_like)


def noisy_tensors(program: Program, plan: Plan) -> dict[str, Tensor]:
    """Return every tensor that the plan cuts, with noise of the same scale at removed positions."""
    generator = torch.Generator(device=program.device).manual_seed(0)

    def noise(removed: Tensor) -> Tensor:
        scale = removed.float().square().mean().sqrt()
        drawn = torch.randn(removed.shape, generator=generator, device=removed.device)
        return (drawn * scale).to(removed.dtype)

    return _refilled(program, plan, noise)


def _refilled(program: Program, plan: Plan, fill: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return every tensor that the plan cuts, with removed values replaced by `fill`."""
    tensors = dict(program.tensors())
    filled: dict[str, Tensor] = {}
    for site, kept in zip(program.sites, plan.for_sites(program.sites), strict=True):
        removed = torch.ones(site.size, dtype=torch.bool)
        removed[kept.long()] = False
        for cut in site.slices:
            tensor = filled.get(cut.parameter, tensors[cut.parameter].detach())
            if cut.by_expert:
                parts = zip(tensor, removed.chunk(site.experts), strict=True)
                matrices = [_refilled_axis(part, cut.axis - 1, own, cut.labels, fill) for part, own in parts]
                filled[cut.parameter] = torch.stack(matrices)
            else:
                filled[cut.parameter] = _refilled_axis(tensor, cut.axis, removed, cut.labels, fill)
    return filled


def _refilled_axis(
    tensor: Tensor,
    axis: int,
    removed: Tensor,
    labels: tuple[int, ...] | None,
    fill: Callable[[Tensor], Tensor],
) -> Tensor:
    gone = _removed_positions(removed, labels).to(tensor.device)
    if not len(gone):
        return tensor
    filling = fill(tensor.index_select(axis, gone))
    if tensor.is_floating_point() and tensor.itemsize == 1:  # Torch copies bytes, but not float8.
        copied = tensor.view(torch.uint8).index_copy(axis, gone, filling.view(torch.uint8))
        return copied.view(tensor.dtype)
    return tensor.index_copy(axis, gone, filling)


def _removed_positions(removed: Tensor, labels: tuple[int, ...] | None) -> Tensor:
    if labels is None:
        return removed.nonzero().flatten()
    follows = torch.tensor(labels)
    return ((follows >= 0) & removed[follows.clamp_min(0)]).nonzero().flatten()


def _compare(
    name, program: Program, expected, actual, tolerance: float, shapes: Shapes | None = None
) -> list[Verification]:
    return compare_decoders(
        name,
        expected,
        actual,
        tolerance,
        vocabulary_size=program.known_tokens,
        shapes=shapes or short_shapes(program),
        device=program.device,
    )
