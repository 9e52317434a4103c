"""`compile`: decoder and text to a verified folder; `learn_plan`: to a plan; `apply`: plan to folder.

    open → capture → learn → lower → verify → write → read back → measure → report → rename

The output appears only after everything in it was verified.  Until then, DIR.state next to it holds the state
of learning, and later the plan.
"""

import os
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from dispfx.compiler.programs import only_planned
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.folder import refuse_existing
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import BudgetError, DispfxError, OutputError, VerificationError
from dispfx.plan.family import Family, stored_plans
from dispfx.plan.plan import Plan, require_same_decoder
from dispfx.report import Observer, Report, load_report
from dispfx.run.complete_output import complete_plan, complete_report
from dispfx.run.decoder_files import Task, require_writable
from dispfx.run.draft_recovery import is_of_plan, recovery_of_draft, require_recoverable, wait_for_draft
from dispfx.run.length_checks import compare_lengths, require_onnx_lengths, window_of
from dispfx.run.opening import open_model
from dispfx.run.plan_learning import (
    DRAFT,
    family_from,
    follow_command,
    held_state,
    learn_from,
    remove_state,
    say_missed,
    state_folder,
)
from dispfx.run.preflight import require_room_for_weights
from dispfx.run.readiness import analysed
from dispfx.run.recovered_folder import recover_folder
from dispfx.run.recovery_job import train_along
from dispfx.run.run_text import TextChoice, open_text, require_tokens
from dispfx.run.timed_stages import Stages
from dispfx.run.writing import write_output
from dispfx.settings import RunSettings
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.trees import ApplySettings
from dispfx.settings.verb_settings import PlanSettings
from dispfx.words.option_names import option


def compile(
    model: str | nn.Module,
    ratio: float | None = None,
    data: Any = None,
    out: str | Path | None = None,
    *,
    settings: RunSettings | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Report:
    """Make a decoder smaller by `ratio` and write a verified folder.

    Args:
        model: MODEL (see `dispfx.words.model_origin`), or a module.
        ratio: share of the counted parameters to remove, in (0, 1).  With a `constraint` it may be left out.
        data: texts to learn from (see `dispfx.words.text_origin`), or token ids, (N,) integers; the demo
            brings its own.
        out: folder to write; it must not exist.
        settings: of the run; the defaults of `RunSettings` without.
        observer: receives progress.
        changes: single settings by their names in `RunSettings`, as in `steps=100, export="onnx"`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DispfxError: for everything in the input that cannot be used.
        VerificationError: if two forms of the pruned decoder disagree; no folder is written then.
    """
    return run_compile(
        run_settings(settings, model=model, ratio=ratio, data=data, out=out, **changes), observer
    )


@overload
def learn_plan(
    model: str | nn.Module,
    ratio: float | None = None,
    data: Any = None,
    out: str | Path | None = None,
    *,
    settings: RunSettings | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Plan: ...


@overload
def learn_plan(
    model: str | nn.Module,
    ratio: str,
    data: Any = None,
    out: str | Path | None = None,
    *,
    settings: RunSettings | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Family: ...


def learn_plan(
    model: str | nn.Module,
    ratio: float | str | None = None,
    data: Any = None,
    out: str | Path | None = None,
    *,
    settings: RunSettings | None = None,
    observer: Observer | None = None,
    **changes: Any,
) -> Plan | Family:
    """Learn a plan and write it to the file `out`; `apply` turns it into a folder.

    The arguments are those of `compile`.  For a range of ratios, as in "0.1:0.6", it is a family of plans.

    Raises:
        UnknownSettingError, DispfxError: as `compile`.
    """
    return run_learn(
        run_settings(settings, model=model, ratio=ratio, data=data, out=out, **changes), observer
    )


def apply(
    model: str | nn.Module,
    plan: str | Path | Plan | Family,
    data: Any = None,
    out: str | Path | None = None,
    *,
    observer: Observer | None = None,
    **changes: Any,
) -> Report:
    """Prune a decoder by the plan that was learned on it, and write a verified folder.

    Args:
        plan: a plan, or its file; or a family of plans, and `ratio` names one.
        data: texts or token ids, (N,) integers, whose last tenth is measured on, unless `eval_data` is given.
        model, out, and others: as for `compile`; single settings are those of `ApplySettings`.

    Raises:
        PlanMismatchError: if the plan belongs to another decoder.
        UnknownSettingError, DispfxError, VerificationError: as `compile`.
    """
    given = {"model": model, "plan": plan, "data": data, "out": out}
    return run_apply(ApplySettings.of(**{**given, **changes}), observer)


def run_settings(settings: RunSettings | None, **changes: Any) -> RunSettings:
    """Return settings with changes; a change of None is ignored."""
    given = {name: value for name, value in changes.items() if value is not None}
    return RunSettings.of(**given) if settings is None else RunSettings.required(settings).changed(**given)


@torch.inference_mode(False)
@torch.enable_grad()
def run_compile(
    settings: RunSettings,
    observer: Observer | None = None,
    *,
    ranks: Ranks = ALONE,
    command: str | None = None,
) -> Report:
    """As `compile`, with all settings in one object.

    Args:
        ranks: the processes of the run, led by this one; all other processes call `follow_compile`.
        command: the command that reproduces this result, for the report.

    Raises:
        DispfxError, VerificationError: as `compile`.
    """
    RunSettings.required(settings)
    if settings.budget.is_range:
        raise BudgetError(
            f"a folder holds one decoder, and a range of ratios was given: {settings.budget.ratio}",
            hint="learn a family of plans with `dispfx learn`, and apply it with one of its ratios",
        )
    path, stages = settings.output.path, Stages(observer)
    if (found := complete_report(settings, stages, ranks)) is not None:
        return found
    refuse_existing(path)
    require_recoverable(settings)
    with held_state(path, settings.output.resume) as state:
        # The pruned weights are in memory next to the dense ones while the folder is written.
        ready, plan = learn_from(settings, stages, ranks=ranks, copies=2.0 - settings.budget.ratios[1])
        task = Task(
            path=path,
            state=state,
            source=ready.source,
            program=ready.program,
            plan=plan,
            text=ready.text,
            settings=settings.changed(align=plan.budget.align).fitted(ready.settings),
            command=command,
        )
        if settings.recovery is not None:
            return _recovered(task, settings.recovery, stages, ranks)
        return _finish(task, stages)


def follow_compile(settings: RunSettings, ranks: Ranks) -> None:
    """Take part in the work of a process that calls `run_compile` with the same settings.

    Raises:
        RankLost: if another process ended.
        DispfxError: as `compile`.
    """
    ready = follow_command(settings, ranks)
    recovery = settings.recovery
    if ready is None or recovery is None:
        return
    wait_for_draft(ranks, ready.program)
    state = state_folder(settings.output.path, True)
    job = recovery_of_draft(recovery, state, ready.source, ready.program, ready.text, settings.output.path)
    train_along(replace(job, resume=settings.output.resume, ranks=ranks))


def _recovered(task: Task, recovery: RecoverySettings, stages: Stages, ranks: Ranks) -> Report:
    """Write the pruned decoder into the state, and DIR from it, trained."""
    assert task.state is not None and isinstance(task.settings, RunSettings)
    draft, measured = task.state / DRAFT, None
    if is_of_plan(draft, task.plan):
        # Its figures and its plan may be of another text to measure on.
        task.plan.save(draft / PLAN_FILE)
    else:
        shutil.rmtree(draft, ignore_errors=True)
        _written(replace(task, path=draft, is_draft=True), stages)
        measured = load_report(draft / "report.json")
    wait_for_draft(ranks, task.program)
    job = replace(
        recovery_of_draft(recovery, task.state, task.source, task.program, task.text, task.path),
        context=window_of(task.source, task.program, task.settings.learning.seq_len),
        windows=task.settings.text.eval_windows,
        measured=measured,
        run_settings=task.settings.plain(),
        export=task.asked_export,
        learned_from=task.text.learned_name,
        resume=task.settings.output.resume,
        command=task.command,
        ranks=ranks,
    )
    try:
        recover_folder(job, stages)
    except DispfxError as error:
        kept = (
            f"{option('resume', True)} with {option('recover', 'none')} writes the pruned decoder without "
            "recovery"
        )
        error.hint = f"{error.hint}; {kept}" if error.hint else kept
        raise
    remove_state(task.state)
    report = load_report(task.path / "report.json")
    stages.observer.finished(report)
    return report


@torch.inference_mode(False)
@torch.enable_grad()
def run_learn(
    settings: RunSettings, observer: Observer | None = None, *, ranks: Ranks = ALONE
) -> Plan | Family:
    """As `learn_plan`, with all settings in one object; `ranks` as for `run_compile`.

    Raises:
        DispfxError: as `compile`.
    """
    path, stages = RunSettings.required(settings).output.path, Stages(observer)
    if (found := complete_plan(settings, stages, ranks)) is not None:
        return found
    refuse_existing(path)
    with held_state(path, settings.output.resume) as state:
        if settings.budget.is_range:
            learned = family_from(settings, stages, ranks=ranks)
        else:
            _, learned = learn_from(settings, stages, ranks=ranks)
        learned.save(path, overwrite=False)
        remove_state(state)
    return learned


def run_apply(
    settings: ApplySettings, observer: Observer | None = None, *, command: str | None = None
) -> Report:
    """As `apply`, with all settings in one object; `command` as for `run_compile`.

    Raises:
        PlanMismatchError, DispfxError, VerificationError: as `apply`.
    """
    given = _given_plan(ApplySettings.required(settings).plan)
    plan = given.plan if isinstance(given, Family) else given
    path = refuse_existing(settings.output.path)
    stages = Stages(observer)
    chosen = TextChoice(settings.text)
    with stages("open"):
        chosen.check()
        ratio = plan.budget.ratio if settings.plan.ratio is None else settings.plan.ratio
        require_room_for_weights(settings.model, copies=2.0 - ratio)
        source = open_model(settings.model)
        require_writable(settings.output.export, source)
        text = open_text(source, chosen)
    stages.say(text.notes)
    text.require_measurable()
    program = only_planned(analysed(source, stages, plan), plan)
    require_same_decoder(program, plan)
    if isinstance(given, Family):
        assert settings.plan.ratio is not None
        plan = given.at(program, settings.plan.ratio)
        say_missed(plan, stages.observer)
    plan = plan.fitted(program.sites)
    if settings.output.export == "onnx":
        require_onnx_lengths(program.lengths, program.context)
    window = 0 if text.measure is None else window_of(source, program, None)
    with stages("check lengths"):
        compare_lengths(source, program, window, stages.observer.note)
    require_tokens(source, text, program.text_tokens)
    task = Task(
        path=path,
        state=None,
        source=source,
        program=program,
        plan=plan,
        text=text,
        settings=settings,
        command=command,
    )
    return _finish(task, stages)


def _given_plan(settings: PlanSettings) -> Plan | Family:
    """Return the plan, or the family of plans.

    Raises:
        BudgetError: if a family was given without a ratio that it has a plan for, or a plan with one.
    """
    given = settings.plan
    if not isinstance(given, Plan | Family):
        given = stored_plans(given)
    if isinstance(given, Plan):
        if settings.ratio is not None:
            raise BudgetError(
                f"{option('ratio')} has no effect: a plan has one ratio, {given.budget.ratio:g}",
                hint=f"leave out {option('ratio')}, or give a family of plans",
            )
        return given
    if settings.ratio is None:
        raise BudgetError(
            f"a family has plans for ratios from {given.range_text}, and none of them was named",
            hint=f"add {option('ratio')} with one of these",
        )
    given.require_ratio(settings.ratio)
    return given


def _finish(task: Task, stages: Stages) -> Report:
    """Write the folder, and remove the state."""
    report = _written(task, stages)
    if task.state is not None:
        remove_state(task.state)
    stages.observer.finished(report)
    return report


def _written(task: Task, stages: Stages) -> Report:
    """Write the folder; where that fails, the plan is kept."""
    try:
        return write_output(task, stages)
    except VerificationError as error:
        if task.state is not None:
            error.hint = _kept_plan(task, task.state / PLAN_FILE, str(task.path))
        raise
    except OutputError as error:
        if task.state is not None and os.path.lexists(task.path):
            error.hint = _kept_plan(task, task.state / PLAN_FILE, "ANOTHER")
        raise


def _kept_plan(task: Task, plan: Path, out: str) -> str:
    """Return where the plan is, and what applies it."""
    model = task.settings.model.model
    if not isinstance(model, str):
        return f"the plan is kept: dispfx.apply(model, {str(plan)!r}, out={out!r})"
    model, kept, out = map(shlex.quote, (model, str(plan), out))
    return f"the plan is kept: dispfx apply {model} {kept} --out {out}"
