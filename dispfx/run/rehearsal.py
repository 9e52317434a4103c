"""Run with random selections, before learning, what comes after it: a failure then costs no hours.

    random selections → lower, both spellings → gated = lowered → smaller modules → program.pt2
                                                                                   → every operation in ONNX

What is covered depends on the decoder's size, so that the rehearsal stays a small share of a run:

1. With values: what transformers builds from the config against the user's module.
2. Always: lowering in both spellings, with every check of the pipeline.  Weights are left out where they are
   more than `_COMPARED_BYTES`, or have no values.
3. With values: the gated decoder against the lowered one in both spellings, at one batch and length.
4. With values: the transformers model with smaller modules, or the reason why it cannot be built.  For a
   module that transformers does not know, and with `--export pt2`, the exported program.  It is written to a
   temporary folder where it has less than `_WRITTEN_BYTES`.
5. With values, if a recovery follows: forward and backward pass of one step.
6. With `--export onnx`: every operation of the graph without a cache is translated once
   (`dispfx.deploy.onnx.one_of_each`), which takes a few seconds, however deep the decoder is.  A mixture of
   experts is captured in the form that is exported.
"""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from dispfx.analysis.links import is_registered
from dispfx.capturing.module_capture import module_logits
from dispfx.capturing.module_state import module_kept
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.programs import exportable, gated, lower_program, only_planned
from dispfx.deploy.checkpoint import rebuilt, underived_buffers
from dispfx.deploy.exported import export_program, save_graph
from dispfx.errors import CaptureError, DataError, UnsupportedGraphError, VerificationError
from dispfx.ir import ops
from dispfx.ir.pipeline import printing_after
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.run.decoder_files import modules_of
from dispfx.run.trainables import try_recovery
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.source import Source
from dispfx.verification.equivalence import (
    SHAPES_BT,
    TOLERANCES,
    ModuleDecoder,
    compare_decoders,
    random_token_ids,
    require,
)
from dispfx.verification.graphs import compared_shapes, short_shapes, tolerance_of, zeroed_lines
from dispfx.words.option_names import option

_COMPARED_BYTES, _WRITTEN_BYTES = 2**32, 2**28
_PLANS_OF_RULES = 3


def rehearse(
    source: Source,
    program: Program,
    budget: Budget,
    export: str | None = None,
    recovery: RecoverySettings | None = None,
) -> None:
    """Pass if a plan of this budget can be lowered, compared, built and written.

    Args:
        source: the decoder that `program` was captured from; both stay unchanged.
        budget: its ratio is removed of every site's features.
        export: as for `compile`.
        recovery: that follows, if one does.

    Raises:
        DispfxError: whatever the later stages raise.
    """
    plan = random_plan(program, budget)
    if export == "dense" and program.dense_statistics and plan.select == "after-norm":
        raise _no_zeroed_decoder(program)
    if export == "dense" and source.config is not None:
        _require_stored_buffers(source, program)
    with printing_after((), lambda name, text: None), torch.no_grad():
        if source.config is not None and _has_values(program):
            _require_same_class(source, program)
        if not _has_values(program) or _bytes(program) > _COMPARED_BYTES:
            hollow = _without_weights(program)
            lower_program(hollow, plan, write="index-add")
            fast = lower_program(hollow, plan, write="gather-add").graph_module
            if export == "onnx":
                _translated(source, program, plan, fast)
            return
        fast, lowered = _compared(program, plan, budget)
        if tolerance_of(program) > TOLERANCES[torch.float32]:
            # How far half precision moves a module's own code is not known before.
            require(*zeroed_lines(program, plan, lowered, source.model, SHAPES_BT[:1]))
        if source.config is not None:
            modules_of(program, plan, source.model, lowered, source.config)
        if source.config is None or export == "pt2":
            other = exportable(source.model, program, plan)
            _exported(other, lowered if other is program else lower_program(other, plan).graph_module)
        if export == "onnx":
            _translated(source, program, plan, fast)
        if recovery is not None:
            try_recovery(program, plan, recovery)


def _require_stored_buffers(source: Source, program: Program) -> None:
    """Require that the decoder is the same without buffers that transformers would not store.

    Raises:
        DataError: with the first of them.
    """
    model = source.model
    lost = underived_buffers(model, source.config) - model.state_dict().keys()
    if not lost or not _has_values(program):
        return
    twin = rebuilt(model, source.config, without=lost).to(program.device)
    if not _agree(program, model, twin, tolerance_of(program), compared_shapes(program)):
        raise DataError(
            "an ordinary checkpoint would lose a buffer: its values are not those of the config, and "
            "transformers does not store it",
            where=min(lost),
            hint=f"leave out {option('export', 'dense')}; the folder itself keeps the buffer",
        )


def _require_same_class(source: Source, program: Program) -> None:
    """Require that the decoder's class, built from its config, gives the same bits with the same tensors.

    A module of another class, a hook, or an attribute or method that was changed would not be in the folder.
    Where there is one, the longest sequence of the run is compared too.

    Raises:
        DataError: otherwise, with the first module that was changed.
    """
    model = source.model
    twin = rebuilt(model, source.config)
    built = dict(twin.named_modules())
    odd = [path for path, module in model.named_modules() if _is_changed(module, built.get(path))]
    shapes = list(compared_shapes(program) if odd else short_shapes(program))
    with module_kept(model), suppress(CaptureError):  # Not every decoder reads a single token.
        module_logits(model, random_token_ids(program.known_tokens, (1, 1), device=program.device))
        shapes.append((1, 1))
    if not _agree(program, model, twin, 0.0, shapes):
        raise DataError(
            "the decoder computes something else than its class does when it is built from its config",
            where=next(filter(None, odd), type(model).__name__),
            hint="undo the change, or wrap the decoder in a module of your own to get a graph",
        )


def _agree(
    program: Program, model: nn.Module, twin: nn.Module, tolerance: float, shapes: Sequence[tuple[int, int]]
) -> bool:
    """Whether two modules give the same logits; the first one, the user's, is not changed."""
    with module_kept(model):
        lines = compare_decoders(
            "rebuilt = model",
            ModuleDecoder(model),
            ModuleDecoder(twin),
            tolerance,
            vocabulary_size=program.known_tokens,
            shapes=shapes,
            device=program.device,
        )
    return all(line.holds for line in lines)


def _is_changed(module: nn.Module, built: nn.Module | None) -> bool:
    """Whether a module has a hook, or another class, method or number than what its class builds."""
    if type(module) is not type(built) or module._forward_hooks or module._forward_pre_hooks:
        return True
    return "forward" in vars(module) or _numbers(module) != _numbers(built) | {"training": module.training}


def _numbers(module: nn.Module | None) -> dict[str, float]:
    """Return a module's own numbers; names that begin with an underscore are not part of its arithmetic."""
    named = vars(module).items()
    return {name: one for name, one in named if isinstance(one, int | float) and not name.startswith("_")}


def random_plan(program: Program, budget: Budget, seed: int = 0) -> Plan:
    """Return a plan that removes this share of every site's features, which meets no budget exactly."""
    generator = torch.Generator().manual_seed(seed)
    kept = [_random_indices(site, budget.keep, generator) for site in program.sites]
    return Plan.of(program, budget, kept, seed)


def _random_indices(site: Site, keep: float, generator: torch.Generator) -> Tensor:
    """Return sorted kept indices; every expert keeps equally many of its own."""
    width = max(1, round(keep * site.per_expert))
    drawn = torch.rand(site.experts, site.per_expert, generator=generator).topk(width).indices.sort().values
    return (drawn + site.per_expert * torch.arange(site.experts).unsqueeze(1)).flatten()


def _compared(
    program: Program, plan: Plan, budget: Budget
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return the lowered decoder in both spellings, gather-add first, compared with the gated one.

    A wrong rule of the user's may suit a plan by chance, so more plans of the ratio are compared where there
    is one.

    Raises:
        VerificationError: if they differ, naming the operations with such rules.
    """
    own = sorted({str(ops.packet(node)) for node in program.graph.nodes if is_registered(node)})
    try:
        for seed in range(1, _PLANS_OF_RULES + 1) if own else ():
            _both_forms(program, random_plan(program, budget, seed))
        return _both_forms(program, plan)
    except VerificationError as error:
        if own:
            error.hint = (
                f"the link rule of {', '.join(own)} may be wrong: on the features that are kept the "
                "operation must do what it does on all of them"
            )
        raise


def _both_forms(program: Program, plan: Plan) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    hard = gated(program, plan)
    fast, lowered = (
        lower_program(program, plan, write=write).graph_module for write in ("gather-add", "index-add")
    )
    for name, form in (("gather-add = gated", fast), ("lowered = gated", lowered)):
        require(
            *compare_decoders(
                name,
                hard,
                form,
                tolerance_of(program),
                vocabulary_size=program.known_tokens,
                shapes=SHAPES_BT[:1],
                device=program.device,
            )
        )
    return fast, lowered


def _translated(source: Source, program: Program, plan: Plan, fast: torch.fx.GraphModule) -> None:
    """Translate what ONNX would be made from; `fast` is written by gather-add."""
    from dispfx.deploy.onnx.exporting import cached_model, require_translations  # imports onnx

    other = exportable(source.model, program, plan)
    if other is not program:
        fast = lower_program(_without_weights(other), plan, write="gather-add").graph_module
    ids = random_token_ids(program.known_tokens, (2, program.lengths.within(9)), device=program.device)
    try:
        require_translations(fast, ids)
    except UnsupportedGraphError:
        # With a cache the graph may have other operations, and that is what is written then.
        cached = None if source.config is None else _cached(source, plan)
        if cached is None:
            raise
        cached_model(cached)


def _cached(source: Source, plan: Plan) -> Program | None:
    """Return the lowered decoder with its cache, or None where it cannot be captured with one."""
    try:
        found = capture_cached(source.model, select=plan.select, sites=plan.sites)
    except (CaptureError, UnsupportedGraphError):
        return None
    return lower_program(only_planned(found, plan), plan, write="gather-add")


def _exported(program: Program, lowered: torch.fx.GraphModule) -> None:
    if _bytes(program) <= _WRITTEN_BYTES:
        with tempfile.TemporaryDirectory() as folder:
            save_graph(lowered, Path(folder))
    else:
        export_program(lowered, random_token_ids(program.known_tokens, (2, 8), device=program.device))


def _has_values(program: Program) -> bool:
    return program.measured and program.device.type != "meta"


def _bytes(program: Program) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in program.parameters.values())


def _without_weights(program: Program) -> Program:
    """Return a copy whose parameters have shapes alone; buffers stay, which may hold an order of features."""
    hollow = program.clone()
    tensors = dict(program.tensors())
    for path, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            tensors[path] = nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
    hollow.rebuild(tensors)
    return hollow


def _no_zeroed_decoder(program: Program) -> UnsupportedGraphError:
    return UnsupportedGraphError(
        f"{option('export', 'dense')} writes zeros, which would change "
        "the statistics that the decoder takes of weights",
        where=next(iter(program.dense_statistics)),
        hint=f"leave out {option('export', 'dense')}; the folder itself loads with dispfx",
    )
