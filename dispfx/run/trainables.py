"""What `recover` trains, by kind: the student, how it is measured, and what of it goes into weight files.

    scales    the lowered graph with a scale per kept feature; the scales are folded into its weights
    weights   the lowered graph; its weights
    lora      the folder's transformers model with PEFT's adapters

A graph is trained if possible, so a module without a class of transformers can be trained too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.compiler.pipelines import for_recovery
from dispfx.compiler.programs import exportable, lower_program
from dispfx.compiler.scales import insert_scales
from dispfx.deploy.checkpoint import PLAN_FILE, implementations
from dispfx.deploy.exported import load_program
from dispfx.deploy.section import read_layout
from dispfx.deploy.weights import read_headers
from dispfx.errors import DispfxError, OutputError, PlanMismatchError
from dispfx.huggingface.adapters import with_adapters
from dispfx.huggingface.model_loading import load_model
from dispfx.ir.program import Program
from dispfx.learning.distillation import RecoveryPass, Student
from dispfx.plan.plan import Plan
from dispfx.run.folders import Opened
from dispfx.run.students import adapted_student, graph_predictions, graph_student, weights_of
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.sections import Dtype
from dispfx.source import Source, dtype_of
from dispfx.verification.equivalence import (
    SHAPES_BT,
    Verification,
    compare_decoders,
    random_token_ids,
)
from dispfx.verification.graphs import short_shapes, tolerance_of, tolerance_of_module
from dispfx.words.option_names import option


@dataclass(frozen=True, eq=False)
class Trainable:
    """One pruned decoder that is trained.

    Args:
        student: what the training sees.
        decoder: token ids (B, T) to logits (B, T, V), with what is trained as it is now.
        module: the graph, or the transformers model with adapters.
        values: returns the parameters of the lowered graph that have changed, by path.
        proof: compares the result of `values` with what was trained.
    """

    student: Student
    decoder: Callable[[Tensor], Any]
    module: Any
    values: Callable[[], Mapping[str, Tensor]]
    proof: Callable[[Mapping[str, Tensor]], list[Verification]]


def lowered_of(opened: Opened, dense: Source, program: Program) -> Program:
    """Return the folder's decoder as a lowered program with its stored weights.

    Args:
        dense: what it was compiled from.
        program: of `dense`.

    Raises:
        OutputError: if the folder has no plan.
    """
    if opened.program is not None:
        return opened.program
    plan = folder_plan(opened)
    lowered = lower_program(exportable(dense.model, program, plan), plan)
    return _with_weights(lowered, _graph_parameters(opened))


def require_compiled_from(opened: Opened, dense: Source, program: Program) -> None:
    """Raise unless a folder's decoder computes what the dense one does, cut by the plan and with its weights.

    The fingerprint of a plan is of weights alone: another config, code or buffer is another decoder too.

    Args:
        dense: what the folder should have been compiled from.
        program: of `dense`.

    Raises:
        PlanMismatchError: if they differ.
    """
    plan = folder_plan(opened)
    stored = opened.program.parameters if opened.program is not None else _graph_parameters(opened)
    cut = _with_weights(lower_program(exportable(dense.model, program, plan), plan), stored)
    lines = compare_decoders(
        "folder = cut",
        cut.graph_module,
        partial(module_logits, opened.decoder),
        max(tolerance_of(program), tolerance_of_module(opened.decoder)),
        vocabulary_size=program.known_tokens,
        shapes=short_shapes(program),
        device=program.device,
    )
    worst = max(lines, key=lambda line: line.max_rel_error)
    if not worst.holds:
        raise PlanMismatchError(
            f"{opened.path.name} was not compiled from {dense.name}: its logits differ by "
            f"{worst.max_rel_error:.1e} from those of {dense.name}, cut by its plan and with its weights",
            where=dense.name,
            hint="use the same config, code and buffers as when the folder was compiled",
        )


def _graph_parameters(opened: Opened) -> dict[str, Tensor]:
    return dict(load_program(opened.path).named_parameters())


def _with_weights(program: Program, stored: Mapping[str, Tensor]) -> Program:
    """Give a lowered program the weights of a folder, by path."""
    program.rebuild(
        {
            path: nn.Parameter(stored[path].detach().to(tensor.device), requires_grad=False)
            if path in stored
            else tensor
            for path, tensor in program.tensors()
        }
    )
    return program


def folder_plan(opened: Opened) -> Plan:
    """Return the plan of a folder.

    Raises:
        OutputError: if it has none.
    """
    path = opened.path / PLAN_FILE
    if opened.plan is None and not path.is_file():
        raise OutputError("recovery needs the folder's plan.safetensors", where=str(opened.path))
    return opened.plan or Plan.load(path)


def stored_dtype(opened: Opened) -> Dtype | None:
    """Return the dtype of a folder's weights where they have one dtype alone, else None."""
    if opened.plan is None:
        dtypes = {one.dtype for one in opened.decoder.parameters() if one.is_floating_point()}
    else:
        dtypes = {one.dtype for one in read_headers(opened.path).values() if one.is_parameter}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    found = names.pop() if len(names) == 1 else None
    return found if found in get_args(Dtype) else None  # type: ignore[return-value]


def trainable_of(
    opened: Opened, lowered: Callable[[], Program], settings: RecoverySettings, dtype: str | None = None
) -> Trainable:
    """Return what is trained.

    Args:
        lowered: returns the folder's decoder as `lowered_of` does.
        dtype: of a transformers model that gets adapters; its own by default.

    Raises:
        DispfxError: if no site can have a scale, or PEFT is missing.
        OutputError: if adapters were asked for a folder that transformers does not load.
    """
    if settings.train == "lora":
        return _adapters(opened, dtype, settings)
    return graph_trainable(lowered(), folder_plan(opened), settings)


def graph_trainable(lowered: Program, plan: Plan, settings: RecoverySettings) -> Trainable:
    """Return the scales or the weights of a lowered program as what is trained.

    Args:
        lowered: with values; from here on nothing in it requires gradients but what is trained.
        plan: that it was lowered by.

    Raises:
        DispfxError: if no site can have a scale.
    """
    return _scales(lowered, plan, settings) if settings.train == "scales" else _weights(lowered, settings)


def try_recovery(program: Program, plan: Plan, settings: RecoverySettings) -> None:
    """Do the forward and backward pass of one step of recovery; nothing is changed.

    Args:
        program: of the dense decoder.
        plan: any plan of it.

    Raises:
        DispfxError: if no site can have a scale, or a loss or gradient is not finite.
    """
    lowered = lower_program(program, plan)
    held = [*program.graph_module.parameters(), *lowered.graph_module.parameters()]
    required = [one.requires_grad for one in held]
    tokens = program.lengths.within(9)
    settings = replace(settings, seq_len=tokens)
    try:
        made = graph_trainable(lowered, plan, settings)
        ids_BT = random_token_ids(program.known_tokens, (2, tokens), device=program.device)
        teacher = graph_predictions(program, with_stream=bool(settings.stream_weight))
        trained = made.student.trained
        step = RecoveryPass(
            teacher, made.student.predictions, tuple(trained.values()), settings.stream_weight
        )
        with torch.enable_grad():
            _, gradients = step(ids_BT)
        for path, gradient in zip(trained, gradients, strict=True):
            if gradient is not None and not bool(gradient.isfinite().all()):
                raise DispfxError(
                    "recovery needs finite gradients, and that of a weight is infinite or not a number",
                    where=path,
                    hint=f"leave out {option('recover')}",
                )
    finally:
        for one, needed in zip(held, required, strict=True):
            one.requires_grad_(needed)


def _weights(program: Program, settings: RecoverySettings) -> Trainable:
    trained = weights_of(program)
    student = graph_student(
        for_recovery(program, settings.seq_len), trained, with_stream=bool(settings.stream_weight)
    )
    return Trainable(student, program.graph_module, program.graph_module, lambda: trained, lambda values: [])


def _scales(program: Program, plan: Plan, settings: RecoverySettings) -> Trainable:
    scaled = insert_scales(program, plan.by_site(program.sites))
    if not scaled.folds:
        raise DispfxError(
            "no scale of a site can be folded into the weights of this decoder",
            where=program.model_class,
            hint=f"use {option('train', 'weights')}",
        )
    program.graph_module.requires_grad_(False)
    student = graph_student(
        for_recovery(scaled.program, settings.seq_len),
        scaled.scales,
        with_stream=bool(settings.stream_weight),
    )
    graph = scaled.program.graph_module

    def proof(values: Mapping[str, Tensor]) -> list[Verification]:
        # Folded weights are rounded once more, so the two differ in float32 as they do in half precision.
        folded = partial(module_logits, program.graph_module, tensors=values)
        tolerance = tolerance_of(program)
        shapes = [(rows, program.lengths.within(tokens)) for rows, tokens in SHAPES_BT]
        return compare_decoders(
            "folded = scaled",
            graph,
            folded,
            tolerance,
            vocabulary_size=program.known_tokens,
            shapes=shapes,
            device=program.device,
        )

    return Trainable(student, graph, program.graph_module, scaled.folded, proof)


def _adapters(opened: Opened, dtype: str | None, settings: RecoverySettings) -> Trainable:
    if opened.plan is None or read_layout(opened.path) is None:
        raise OutputError(
            "adapters need a folder that transformers loads, and this one holds a graph",
            where=str(opened.path),
            hint=f"use {option('train', 'weights')} or {option('train', 'scales')}",
        )
    model = with_adapters(own_model(opened, dtype), settings, str(opened.path)).eval()
    return Trainable(adapted_student(model), partial(module_logits, model), model, dict, lambda values: [])


def own_model(opened: Opened, dtype: str | None = None) -> nn.Module:
    """Return the folder's transformers model anew, in its own dtype or another."""
    chosen = {} if dtype is None else {"dtype": dtype_of(dtype)}
    return load_model(
        opened.path,
        device=opened.device,
        trust_remote_code=opened.trust_remote_code,
        **implementations(opened.path),
        **chosen,
    )
