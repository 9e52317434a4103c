"""Verbs that make something: compile, learn, apply, recover and its other name finetune."""

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dispfx.cli.launching import check_shard, launches
from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import DataError
from dispfx.settings import RunSettings
from dispfx.settings.trees import ApplySettings, RecoverSettings
from dispfx.words.chosen_device import local_device
from dispfx.words.model_origin import origin_of
from dispfx.words.preconditions import check_files, check_folder, check_select
from dispfx.words.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.report import Report


def compile(settings: RunSettings, screen: Screen) -> None:
    """Make a decoder smaller: learn what to remove, remove it, verify, and write a folder."""
    _check_to_learn(settings)
    if not settings.output.dry_run and launches(settings.compute.launch):
        return
    from dispfx import api
    from dispfx.distributed.ranks import joined

    learns_on, settings = _placed(settings)
    if settings.output.dry_run:
        _preview(screen, settings, "a pruned decoder, its plan, report and page")
        return
    with joined(learns_on) as ranks, screen.observer(ranks.leads) as observer:
        if not ranks.leads:
            api.follow_compile(settings, ranks)
            return
        report = api.run_compile(settings, observer, ranks=ranks, command=command_line())
    _show_folder(screen, report, settings)


def learn(settings: RunSettings, screen: Screen) -> None:
    """Learn what to remove and write only the plan, or a family of plans; `dispfx apply` uses it."""
    _check_to_learn(settings)
    if not settings.output.dry_run and launches(settings.compute.launch):
        return
    from dispfx import api
    from dispfx.distributed.ranks import joined
    from dispfx.plan.plan import Plan
    from dispfx.report.plans import family_lines, family_plain, target_plain

    learns_on, settings = _placed(settings)
    if settings.output.dry_run:
        ratio = settings.budget.ratio
        several = f"a family of plans for ratios {ratio}; the figures are those of the largest"
        _preview(screen, settings, several if settings.budget.is_range else "a plan")
        return
    with joined(learns_on) as ranks, screen.observer(ranks.leads) as observer:
        if not ranks.leads:
            api.follow_command(settings, ranks)
            return
        plan = api.run_learn(settings, observer, ranks=ranks)
    out = settings.output.out
    if not isinstance(plan, Plan):
        screen.print_json({"family": str(out), **family_plain(plan)})
        screen.print_text(f"{out}: {family_lines(plan)[0]}")
        return
    sites = [
        {"name": selection.site, "size": selection.size, "kept": len(selection.kept)}
        for selection in plan.selections
    ]
    ratios = {"requested": plan.budget.ratio, "achieved": plan.achieved, "of": plan.budget.of}
    screen.print_json(
        {"plan": str(out), "fingerprint": plan.fingerprint, "ratio": ratios, "sites": sites}
        | target_plain(plan.budget, plan.cache, plan.met)
    )
    screen.print_text(f"{out}: removes {plan.achieved:.2%} of {plan.budget.of} ({len(sites)} sites)")


def apply(settings: ApplySettings, screen: Screen) -> None:
    """Remove what a plan says from the decoder it was learned on, verify, and write a folder."""
    check_files([settings.plan.plan], "plan")
    _check(settings)
    from dispfx import api

    with screen.observer() as observer:
        report = api.run_apply(settings, observer, command=command_line())
    _show_folder(screen, report, settings)


def _check_to_learn(settings: RunSettings) -> None:
    """Check all arguments before slow imports."""
    budget, compute = settings.budget, settings.compute
    if not settings.text.data and origin_of(settings.model.model) != "demo":
        raise DataError("text to learn from is needed", hint="name a text file with --data")
    check_select(budget.select, constrained=settings.learning.constrained, costs=budget.costs is not None)
    _check(settings)
    check_shard(compute.shard, compute.launch)


def _check(settings: RunSettings | ApplySettings) -> None:
    origin_of(settings.model.model)
    check_texts(settings.text.data or [], settings.text.data_weight)
    check_texts(settings.text.eval_data or [])
    if not settings.output.resume:
        refuse_existing(settings.output.path)


def _placed(settings: RunSettings) -> tuple[str, RunSettings]:
    """Return the device that masks are learned on, and the settings with the device of this rank's shard."""
    learns_on = local_device(settings.model.device) or "cpu"
    return learns_on, settings.changed(shard_on=learns_on) if settings.compute.shard else settings


def _preview(screen: Screen, settings: RunSettings, written: str) -> None:
    from dispfx import api
    from dispfx.report.run_preview import preview_lines, preview_plain

    with screen.observer() as observer:
        found = api.preview(settings, observer)
    screen.print_json(preview_plain(found))
    for line in preview_lines(found, written):
        screen.print_text(line)


def command_line() -> str:
    """Return the command that gives this result again; `--resume` has no part in it."""
    return shlex.join(["dispfx", *(word for word in sys.argv[1:] if word != "--resume")])


def _show_folder(screen: Screen, report: "Report", settings: RunSettings | ApplySettings) -> None:
    from dispfx.report import to_plain

    screen.print_json(to_plain(report))
    screen.print_text(f"written: {settings.output.out}")


def recover(settings: RecoverSettings, screen: Screen) -> None:
    """Train a pruned decoder to predict what the dense one predicts, to win back what pruning has cost."""
    text, output = settings.text, settings.output
    check_folder(settings.model.model)
    origin_of(settings.teacher.dense)
    check_texts(text.data, text.data_weight)
    check_texts(text.eval_data or [])
    if not output.resume:
        refuse_existing(output.path)
    if launches(output.launch):
        return
    from dispfx import api
    from dispfx.distributed.ranks import joined
    from dispfx.report import to_plain
    from dispfx.report.tuning_record import tuning_lines

    with (
        joined(local_device(settings.model.device) or "cpu") as ranks,
        screen.observer(ranks.leads) as observer,
    ):
        if not ranks.leads:
            api.follow_recovery(settings, ranks)
            return
        told = api.run_recover(settings, observer, ranks=ranks, command=command_line())
    whole = settings.recovery.train != "lora" or output.merge
    screen.print_json({"out": str(output.out), "merged": whole, **to_plain(told)})
    for line in tuning_lines(told):
        screen.print_text(line)
    screen.print_text(f"written: {output.out}")


def finetune(settings: RecoverSettings, screen: Screen) -> None:
    """Train LoRA adapters on a pruned decoder: another name of `recover --train lora`."""
    recover(replace(settings, recovery=replace(settings.recovery, train="lora")), screen)
