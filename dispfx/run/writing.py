"""Write an output folder: lower, verify, write, read back, measure."""

from dataclasses import replace

from dispfx.analysis.label_map import Mismatch
from dispfx.compiler.programs import lower
from dispfx.deploy.digests import digests
from dispfx.deploy.folder import new_folder
from dispfx.huggingface.saving import PrunedModel
from dispfx.report import Report
from dispfx.run.decoder_files import Task, pruned_modules, write_decoder
from dispfx.run.folder_report import cache_change, compared_texts, report_of, skill_changes, write_words
from dispfx.run.folders import Written, open_folder
from dispfx.run.targets import Form, Target, target_named
from dispfx.run.timed_stages import Stages
from dispfx.source.own_code import private_code
from dispfx.verification.equivalence import Verification, require
from dispfx.verification.graphs import (
    captured_lines,
    identity_lines,
    lowered_lines,
    module_lines,
    outside_lines,
    reloaded_lines,
)


def write_output(task: Task, stages: Stages) -> Report:
    """Write DIR, verify it, read it back, and return its report.

    Raises:
        VerificationError: if two forms disagree; DIR does not exist then.
    """
    with stages("lower"):
        lowered = lower(task.program, task.plan)
        pruned = pruned_modules(task, lowered)
    if isinstance(pruned, Mismatch):
        stages.observer.note(
            f"transformers cannot hold this decoder as modules ({pruned.reason}); dispfx.load opens it"
        )
    lines: list[Verification] = []
    with stages("verify"):
        lines += captured_lines(task.program)
        _add(lines, identity_lines(task.program), stages)
        _add(lines, lowered_lines(task.program, task.plan, lowered, task.source.model), stages)
        if isinstance(pruned, PrunedModel):
            _add(lines, module_lines(task.program, lowered, pruned.model), stages)
            _add(lines, outside_lines(task.program, task.plan, task.source.model, pruned.model), stages)
    with new_folder(task.path) as folder, private_code(folder):
        with stages("write"):
            write_decoder(task, folder, lowered, pruned)
        with stages("reload"):
            # A graph is compared bit by bit, so it must compute its experts like the written one.
            experts = "batched" if isinstance(pruned, PrunedModel) else "grouped"
            opened = open_folder(
                folder,
                device=task.program.device,
                trust_remote_code=task.runs_own_code,
                experts=experts,
            )
            reloaded = opened.decoder
            name, written = (
                ("modules", pruned.model) if isinstance(pruned, PrunedModel) else ("lowered", lowered)
            )
            _add(lines, reloaded_lines(name, task.program, written, reloaded), stages)
        name, target = target_named(task.exports)
        form = Form(name, task.source, task.program, task.plan, lowered, opened)
        exported = Written([]) if name == "none" else _exported(target, form, lines, stages)
        with stages("measure"):
            measured = compared_texts(task, reloaded)
            skills = skill_changes(task, reloaded)
        with stages("digest"):
            files = digests(folder)
        report = report_of(task, folder, tuple(lines), measured, skills, files, stages)
        cache = cache_change(task, reloaded, exported.cache_bytes)
        report = replace(report, onnx_without_cache=exported.no_cache, cache=cache)
        write_words(task, folder, report, as_modules=isinstance(pruned, PrunedModel))
    return report


def _exported(target: Target, form: Form, lines: list[Verification], stages: Stages) -> Written:
    """Write the requested form, and record its comparisons."""
    with stages(form.name):
        written = target(form)
        _add(lines, written.lines, stages)
    stages.say(written.notes)
    return written


def _add(lines: list[Verification], found: list[Verification], stages: Stages) -> None:
    """Record and show comparisons, and stop at one that fails."""
    lines += found
    for line in found:
        stages.observer.verified(line)
    require(*found)
