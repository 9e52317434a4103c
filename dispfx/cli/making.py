"""Verbs that make something: compile, learn, apply."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispfx.chosen_device import local_device
from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.launching import check_shard, launches
from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import DataError
from dispfx.origin import origin_of
from dispfx.preconditions import check_files, check_ratio, check_select
from dispfx.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.report import Report

_LEARNING = (
    "recipe",
    "samples",
    "antithetic",
    "sharpen",
    "start",
    "packing",
    "method",
    "steps",
    "seq_len",
    "batch_size",
    "accumulate",
    "lr",
    "schedule",
    "weight_decay",
    "lambda_",
    "budget_on",
    "budget_width",
    "bias",
    "temperature",
    "estimator",
    "hypernetwork",
    "seed",
    "save_every",
    "max_bad_steps",
)


@reports_faults
def compile(  # the verb's name
    model: given.Model,
    ratio: given.RatioShare,
    out: given.Out,
    data: given.Data = None,
    data_weight: given.DataWeight = None,
    data_field: given.DataField = None,
    data_bytes: given.DataBytes = None,
    bos: given.Bos = "auto",
    allow_unknown: given.AllowUnknown = False,
    eval_data: given.EvalData = None,
    eval_windows: given.EvalWindows = None,
    tokenizer: given.Tokenizer = None,
    ratio_of: given.RatioOf = "blocks",
    recipe: given.Recipe = None,
    method: given.Method = None,
    steps: given.Steps = None,
    seq_len: given.SeqLen = None,
    batch_size: given.BatchSize = None,
    accumulate: given.Accumulate = None,
    lr: given.Lr = None,
    schedule: given.Schedule = None,
    weight_decay: given.WeightDecay = None,
    lambda_: given.Lambda = None,
    budget_on: given.BudgetOn = None,
    budget_width: given.BudgetWidth = None,
    bias: given.Bias = None,
    temperature: given.Temperature = None,
    samples: given.Samples = None,
    antithetic: given.Antithetic = None,
    sharpen: given.Sharpen = None,
    start: given.Start = None,
    packing: given.Packing = None,
    estimator: given.Estimator = None,
    hypernetwork: given.Hypernetwork = None,
    constrained: given.Constrained = False,
    select: given.Select = "after-norm",
    compile_: given.Compile = "auto",
    checkpointing: given.Checkpointing = "auto",
    launch: given.Launch = None,
    shard: given.Shard = False,
    seed: given.Seed = None,
    save_every: given.SaveEvery = None,
    max_bad_steps: given.MaxBadSteps = None,
    resume: given.Resume = False,
    dry_run: given.DryRun = False,
    align: given.Align = None,
    costs: given.Costs = None,
    skip: given.Skip = None,
    target: given.Target = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    revision: given.Revision = None,
    trust_remote_code: given.TrustRemoteCode = False,
    export: given.Export = None,
    print_after: given.PrintAfter = None,
    from_report: given.FromReport = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Make a decoder smaller: learn what to remove, remove it, verify, and write a folder."""
    chosen = _learning_options(locals())
    _check_ratio_and_data(model, ratio, data)
    check_select(select, constrained=constrained, costs=costs is not None)
    _check(model, data, data_weight, eval_data, None if resume else out)
    check_shard(shard, launch)
    if not dry_run and launches(launch):
        return
    from dispfx import api
    from dispfx.ranks import joined

    settings = api.learn_settings(model, **chosen) if chosen else None
    learns_on, opens_on = _devices(local_device(device), shard)
    screen = Screen(json, quiet)
    arguments: dict[str, Any] = dict(
        data=data,
        **reading_options(data_field, data_bytes, data_weight),
        bos=bos,
        allow_unknown=allow_unknown,
        out=out,
        eval_data=eval_data,
        tokenizer=tokenizer,
        ratio_of=ratio_of,
        settings=settings,
        compute=api.Compute(compile_, checkpointing, shard_on=learns_on if shard else None),
        align=align,
        costs=costs,
        skip=tuple(skip or ()),
        select=select,
        target=target,
        dtype=dtype,
        device=opens_on,
        revision=revision,
        trust_remote_code=trust_remote_code,
        resume=resume,
    )
    after = tuple(print_after or ())
    if dry_run:
        written = "a pruned decoder, its plan, report and page"
        _preview(screen, model, ratio, after, written, arguments | {"export": export})
        return
    with joined(learns_on) as ranks, screen.observer(ranks.leads) as observer:
        if not ranks.leads:
            api.follow_command(model, ratio, ranks=ranks, **arguments)
            return
        # What the leading process alone needs.
        arguments |= dict(export=export, eval_windows=eval_windows, command=command_line(), observer=observer)
        with api.printing(after, observer):
            report = api.compile(model, ratio, ranks=ranks, **arguments)
    _show_folder(screen, report, out)


@reports_faults
def learn(
    model: given.Model,
    ratio: given.RatioShare,
    out: given.PlanOut = Path("plan.safetensors"),
    data: given.Data = None,
    data_weight: given.DataWeight = None,
    data_field: given.DataField = None,
    data_bytes: given.DataBytes = None,
    bos: given.Bos = "auto",
    allow_unknown: given.AllowUnknown = False,
    tokenizer: given.Tokenizer = None,
    ratio_of: given.RatioOf = "blocks",
    recipe: given.Recipe = None,
    method: given.Method = None,
    steps: given.Steps = None,
    seq_len: given.SeqLen = None,
    batch_size: given.BatchSize = None,
    accumulate: given.Accumulate = None,
    lr: given.Lr = None,
    schedule: given.Schedule = None,
    weight_decay: given.WeightDecay = None,
    lambda_: given.Lambda = None,
    budget_on: given.BudgetOn = None,
    budget_width: given.BudgetWidth = None,
    bias: given.Bias = None,
    temperature: given.Temperature = None,
    samples: given.Samples = None,
    antithetic: given.Antithetic = None,
    sharpen: given.Sharpen = None,
    start: given.Start = None,
    packing: given.Packing = None,
    estimator: given.Estimator = None,
    hypernetwork: given.Hypernetwork = None,
    constrained: given.Constrained = False,
    select: given.Select = "after-norm",
    compile_: given.Compile = "auto",
    checkpointing: given.Checkpointing = "auto",
    launch: given.Launch = None,
    shard: given.Shard = False,
    seed: given.Seed = None,
    save_every: given.SaveEvery = None,
    max_bad_steps: given.MaxBadSteps = None,
    resume: given.Resume = False,
    dry_run: given.DryRun = False,
    align: given.Align = None,
    costs: given.Costs = None,
    skip: given.Skip = None,
    target: given.Target = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    revision: given.Revision = None,
    trust_remote_code: given.TrustRemoteCode = False,
    print_after: given.PrintAfter = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Learn what to remove and write the plan alone; `dispfx apply` uses it."""
    chosen = _learning_options(locals())
    _check_ratio_and_data(model, ratio, data)
    check_select(select, constrained=constrained, costs=costs is not None)
    _check(model, data, data_weight, None, None if resume else out)
    check_shard(shard, launch)
    if not dry_run and launches(launch):
        return
    from dispfx import api
    from dispfx.ranks import joined

    settings = api.learn_settings(model, **chosen) if chosen else None
    learns_on, opens_on = _devices(local_device(device), shard)
    screen = Screen(json, quiet)
    arguments: dict[str, Any] = dict(
        data=data,
        **reading_options(data_field, data_bytes, data_weight),
        bos=bos,
        allow_unknown=allow_unknown,
        out=out,
        tokenizer=tokenizer,
        ratio_of=ratio_of,
        settings=settings,
        compute=api.Compute(compile_, checkpointing, shard_on=learns_on if shard else None),
        align=align,
        costs=costs,
        skip=tuple(skip or ()),
        select=select,
        target=target,
        dtype=dtype,
        device=opens_on,
        revision=revision,
        trust_remote_code=trust_remote_code,
        resume=resume,
    )
    after = tuple(print_after or ())
    if dry_run:
        _preview(screen, model, ratio, after, "a plan", arguments)
        return
    with joined(learns_on) as ranks, screen.observer(ranks.leads) as observer:
        if not ranks.leads:
            api.follow_command(model, ratio, ranks=ranks, **arguments)
            return
        with api.printing(after, observer):
            plan = api.learn_plan(model, ratio, ranks=ranks, observer=observer, **arguments)
    sites = [
        {"name": selection.site, "size": selection.size, "kept": len(selection.kept)}
        for selection in plan.selections
    ]
    ratios = {"requested": plan.budget.ratio, "achieved": plan.achieved, "of": plan.budget.of}
    screen.print_json({"plan": str(out), "fingerprint": plan.fingerprint, "ratio": ratios, "sites": sites})
    screen.print_text(f"{out}: removes {plan.achieved:.2%} of {plan.budget.of} ({len(sites)} sites)")


@reports_faults
def apply(
    model: given.Model,
    plan: given.PlanFile,
    out: given.Out,
    data: given.Data = None,
    data_weight: given.DataWeight = None,
    data_field: given.DataField = None,
    data_bytes: given.DataBytes = None,
    bos: given.Bos = "auto",
    allow_unknown: given.AllowUnknown = False,
    eval_data: given.EvalData = None,
    eval_windows: given.EvalWindows = None,
    tokenizer: given.Tokenizer = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    revision: given.Revision = None,
    trust_remote_code: given.TrustRemoteCode = False,
    export: given.Export = None,
    print_after: given.PrintAfter = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Remove what a plan says from the decoder it was learned on, verify, and write a folder."""
    check_files([plan], "plan")
    _check(model, data, data_weight, eval_data, out)
    from dispfx import api

    screen = Screen(json, quiet)
    with screen.observer() as observer, api.printing(print_after or (), observer):
        report = api.apply(
            model,
            plan,
            out=out,
            data=data,
            **reading_options(data_field, data_bytes, data_weight),
            bos=bos,
            allow_unknown=allow_unknown,
            eval_data=eval_data,
            eval_windows=eval_windows,
            tokenizer=tokenizer,
            dtype=dtype,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            export=export,
            observer=observer,
            command=command_line(),
        )
    _show_folder(screen, report, out)


def _learning_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of learning that the user chose, by their names in LearnSettings."""
    chosen = {name: options[name] for name in _LEARNING if options[name] is not None}
    return chosen | ({"constrained": True} if options["constrained"] else {})


def _check_ratio_and_data(model: str, ratio: float, data: Sequence[str] | None) -> None:
    check_ratio(ratio)
    if not data and origin_of(model) != "demo":
        raise DataError("text to learn from is needed", hint="name a text file with --data")


def reading_options(
    data_field: str | None, data_bytes: int | None, data_weight: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return what the user said about reading text, by the names of the API."""
    options = {"data_weights": data_weight, "data_field": data_field, "data_bytes": data_bytes}
    return {name: value for name, value in options.items() if value is not None}


def _check(
    model: str,
    data: Sequence[str] | None,
    weights: Sequence[float] | None,
    eval_data: Sequence[str] | None,
    out: Path | None,
) -> None:
    """Check every word that can be wrong, before anything slow is imported."""
    origin_of(model)
    check_texts(data or [], weights)
    check_texts(eval_data or [])
    if out is not None:
        refuse_existing(out)


def _preview(
    screen: Screen,
    model: str,
    ratio: float,
    print_after: Sequence[str],
    written: str,
    arguments: dict[str, Any],
) -> None:
    from dispfx import api
    from dispfx.report.preview import preview_lines, preview_plain

    with screen.observer() as observer, api.printing(print_after, observer):
        found = api.preview(model, ratio, **arguments, observer=observer)
    screen.print_json(preview_plain(found))
    for line in preview_lines(found, written):
        screen.print_text(line)


def _devices(device: str | None, shard: bool) -> tuple[str, str | None]:
    """Return where masks are learned, and where the decoder is opened: no device may hold all its parts."""
    return device or "cpu", "cpu" if shard else device


def command_line() -> str:
    """Return the command as the user gave it."""
    return shlex.join(["dispfx", *sys.argv[1:]])


def _show_folder(screen: Screen, report: "Report", out: Path) -> None:
    from dispfx.report import to_plain

    screen.print_json(to_plain(report))
    screen.print_text(f"written: {out}")
