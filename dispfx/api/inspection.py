"""Before a run: `inspect`, what can be pruned in a decoder; `preview`, what a compile would do."""

from typing import Any

import torch

from dispfx.analysis.finite_weights import require_finite_weights
from dispfx.compiler.programs import analyse
from dispfx.deploy.folder import refuse_existing
from dispfx.estimate.devices import this_cpu
from dispfx.estimate.run_estimate import estimate
from dispfx.ir.program import Program
from dispfx.learning.state import saved_step
from dispfx.plan.budget import Budget
from dispfx.plan.decoder_count import count_of
from dispfx.plan.hardening import Groups, ParameterCount, check_reachable, hard_masks, harden
from dispfx.plan.plan import Plan
from dispfx.report import Observer
from dispfx.report.run_preview import Preview
from dispfx.run.opening import open_model
from dispfx.run.plan_learning import state_folder
from dispfx.run.readiness import ready_to_learn
from dispfx.run.recovery_job import fitted_recovery
from dispfx.run.rehearsal import rehearse
from dispfx.run.timed_stages import Stages
from dispfx.settings import LearnSettings, RunSettings
from dispfx.settings.sections import UNALIGNED
from dispfx.settings.verb_settings import INSPECTED_RATIO
from dispfx.source import config_alone, load_config


def inspect(model: Any, *, config_only: bool = False, **changes: Any) -> Program:
    """Return what can be pruned in a decoder, and what is refused and why.

    Args:
        model: MODEL, a module, a config.json, or `RunSettings`.
        config_only: read no weights, which is also the case for a config alone.  The graph
            is then not compared with the decoder (`Program.measured`).
        changes: settings of model and budget by their names in `RunSettings`, as in `skip=["*.mlp"]`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        SourceError: if a weight contains NaN or infinity.
        CaptureError, UnsupportedGraphError: if nothing can be pruned.
        DispfxError: whatever a compile would raise after learning (`dispfx.run.rehearsal`).
    """
    settings = RunSettings.given(model, {"ratio": INSPECTED_RATIO} | changes)
    chosen = settings.model
    if isinstance(chosen.model, str) and (config_only or config_alone(chosen.model)):
        source = load_config(
            chosen.model,
            revision=chosen.revision,
            dtype=chosen.dtype,
            trust_remote_code=chosen.trust_remote_code,
        )
    else:
        source = open_model(chosen)
        require_finite_weights(source.model)
    program = analyse(
        source.model,
        skip=settings.budget.skip,
        select=settings.budget.select,
        sites=settings.budget.sites,
    )
    rehearse(source, program, Budget.of_settings(settings.budget, UNALIGNED))
    return program


def preview(settings: RunSettings, observer: Observer | None = None) -> Preview:
    """Return what a run with these settings would do; nothing is learned or written.

    Raises:
        DispfxError: for every input that the run would reject before learning, such as a ratio
            that cannot be met.
    """
    output = RunSettings.required(settings).output
    path, resume = output.path, output.resume
    if not resume:
        refuse_existing(path)
    state = state_folder(path, resume)
    ready = ready_to_learn(settings, Stages(observer))
    program = ready.program
    plan = _plan_of_widths(program, ready.budget, ready.settings)
    total = ParameterCount.of_sites(program.sites, program.shapes, "total")
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
        budget=plan.budget,
        recovery=recovery,
        reachable=plan.achieved,
        cache=plan.cache,
        met=plan.met,
        parameters=needed.parameters,
        parameters_left=total.count_kept(hard_masks(program.sites, plan.for_sites(program.sites))),
        tokens=sum(len(tokens) for tokens in ready.text.learn),
        tokens_measured=0 if measured is None else len(measured),
        cpu_seconds=needed.seconds(this_cpu(program.dtype)) if on_cpu else None,
        out=path,
        state=state,
        resumes_at=saved_step(state) if resume else None,
    )


def _plan_of_widths(program: Program, budget: Budget, settings: LearnSettings) -> Plan:
    """Return the plan of widths that meet the budget with equal logits."""
    sites, count = program.sites, count_of(budget, program)
    groups = Groups.of_run(sites, constrained=settings.constrained)
    check_reachable(sites, count, budget, groups=groups)
    kept = harden(torch.zeros(groups.features), sites, count, budget, groups=groups)
    return Plan.of(program, budget, kept, settings.seed)
