"""What a compile would do, without doing it: the decoder is captured and analysed, and nothing is written."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dispfx.api.opening import Opening
from dispfx.api.plan_learning import state_folder
from dispfx.api.readiness import Learning, ready_to_learn
from dispfx.api.stages import Stages
from dispfx.api.text import TextChoice
from dispfx.deploy.folder import refuse_existing
from dispfx.ir.budget import Groups, ParameterCount, check_reachable, hard_masks, harden
from dispfx.ir.plan import Budget, BudgetOf
from dispfx.ir.program import Program
from dispfx.ir.sites import Select
from dispfx.learning.settings import LearnSettings
from dispfx.learning.state import saved_step
from dispfx.measure.devices import this_cpu
from dispfx.measure.estimate import estimate
from dispfx.preconditions import check_ratio
from dispfx.report import NullObserver, Observer
from dispfx.report.preview import Preview
from dispfx.source.text import Words
from dispfx.text_origin import TEXT_BYTES, TEXT_FIELD, Bos, Reading
from dispfx.training.preparation import Compute


def preview(
    model: str | nn.Module,
    ratio: float,
    *,
    out: str | Path,
    data: Words | Tensor | None = None,
    eval_data: Words | None = None,
    data_weights: Sequence[float] | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    bos: Bos = "auto",
    allow_unknown: bool = False,
    tokenizer: str | None = None,
    ratio_of: BudgetOf = "blocks",
    settings: LearnSettings | None = None,
    compute: Compute | None = None,
    align: int | None = None,
    costs: str | Path | None = None,
    skip: Sequence[str] = (),
    select: Select = "after-norm",
    target: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
    export: str | None = None,
    observer: Observer | None = None,
) -> Preview:
    """Return what `compile` or `learn_plan` would do with the same arguments; nothing is learned or written.

    The arguments are theirs, without those that only a run needs: `data` is texts, or token ids (N,) int64.

    Raises:
        DispfxError: for everything in the input that they would refuse before learning, a ratio that cannot
            be met among it.
    """
    check_ratio(ratio)
    path = Path(out).expanduser()
    if not resume:
        refuse_existing(path)
    state = state_folder(path, resume)
    how = Learning(
        ratio,
        ratio_of,
        settings,
        align,
        tuple(skip),
        target,
        resume,
        compute,
        costs,
        export=export,
        select=select,
    )
    opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
    reading = Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown)
    chosen = TextChoice(data, eval_data, data_weights, reading)
    ready = ready_to_learn(opening, chosen, how, Stages(observer or NullObserver()))
    program = ready.program
    budget = Budget(ratio, ratio_of, how.alignment(program), ready.costs)
    reachable, left = _widths(program, budget, ready.settings)
    needed = estimate(program, ready.settings, of=ratio_of)
    on_cpu = program.device.type == "cpu"
    measured = ready.text.measure
    return Preview(
        program=program,
        settings=ready.settings,
        estimate=needed,
        ratio=ratio,
        ratio_of=ratio_of,
        align=budget.align,
        reachable=reachable,
        parameters=needed.parameters,
        parameters_left=left,
        tokens=sum(len(tokens) for tokens in ready.text.learn),
        tokens_measured=0 if measured is None else len(measured),
        cpu_seconds=needed.seconds(this_cpu(program.dtype)) if on_cpu else None,
        out=path,
        state=state,
        resumes_at=saved_step(state) if resume else None,
    )


def _widths(program: Program, budget: Budget, settings: LearnSettings) -> tuple[float, int]:
    """Return the ratio, and the parameters left, of widths that meet the budget with equal logits."""
    sites = program.sites
    count = ParameterCount.of_sites(sites, program.shapes, budget.of)
    groups = Groups.of_run(sites, constrained=settings.constrained)
    check_reachable(sites, count, budget, groups=groups)
    masks = hard_masks(sites, harden(torch.zeros(groups.features), sites, count, budget, groups=groups))
    total = ParameterCount.of_sites(sites, program.shapes, "total")
    return 1.0 - count.count_kept(masks) / count.dense, total.count_kept(masks)
