"""What a compile would do: the decoder is captured and analysed, and nothing is written."""

import torch

from dispfx.deploy.folder import refuse_existing
from dispfx.estimate.devices import this_cpu
from dispfx.estimate.run_estimate import estimate
from dispfx.ir.program import Program
from dispfx.learning.state import saved_step
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import Groups, ParameterCount, check_reachable, hard_masks, harden
from dispfx.report import NullObserver, Observer
from dispfx.report.run_preview import Preview
from dispfx.run.plan_learning import state_folder
from dispfx.run.readiness import ready_to_learn
from dispfx.run.recovery_job import fitted_recovery
from dispfx.run.timed_stages import Stages
from dispfx.settings import LearnSettings, RunSettings


def preview(settings: RunSettings, observer: Observer | None = None) -> Preview:
    """Return what a run with these settings would do; nothing is learned or written.

    Raises:
        DispfxError: for every input that the run would reject before learning, such as a ratio
            that cannot be met.
    """
    path, resume = settings.output.path, settings.output.resume
    if not resume:
        refuse_existing(path)
    state = state_folder(path, resume)
    ready = ready_to_learn(settings, Stages(observer or NullObserver()))
    program = ready.program
    reachable, left = _widths(program, ready.budget, ready.settings)
    needed = estimate(program, ready.settings, of=ready.budget.of)
    recovery = settings.recovery
    if recovery is not None:
        recovery = fitted_recovery(recovery, ready.source, program, ready.text)
    on_cpu = program.device.type == "cpu"
    measured = ready.text.measure
    return Preview(
        program=program,
        settings=ready.settings,
        estimate=needed,
        budget=ready.budget,
        recovery=recovery,
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
    """Return the ratio and the remaining parameters of widths that meet the budget with equal logits."""
    sites = program.sites
    count = ParameterCount.of_sites(sites, program.shapes, budget.of)
    groups = Groups.of_run(sites, constrained=settings.constrained)
    check_reachable(sites, count, budget, groups=groups)
    masks = hard_masks(sites, harden(torch.zeros(groups.features), sites, count, budget, groups=groups))
    total = ParameterCount.of_sites(sites, program.shapes, "total")
    return 1.0 - count.count_kept(masks) / count.dense, total.count_kept(masks)
