"""Recover what pruning has cost: train the decoder of an output folder towards the dense one, and write it.

    DIR, dense decoder, text → training → OUT      a folder like DIR with other weights, verified

Sizes, files and the plan stay what they were, and so does the proof of the cut.  What changes is compared
anew.  The result is never worse than DIR on the second text: where KL has risen there, OUT has DIR's weights.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.compiler.pipelines import gathered
from dispfx.demo.probe import skill_probe
from dispfx.deploy import exported, weights
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.digests import digests, stored_size
from dispfx.deploy.folder import new_folder
from dispfx.deploy.section import read_layout
from dispfx.huggingface.adapters import load_adapters, save_adapters
from dispfx.huggingface.saving import PrunedModel
from dispfx.ir.program import Program
from dispfx.learning.distillation import Keeping, Recovered, RecoveryStep, recover
from dispfx.quality.agreement import Comparison
from dispfx.report import (
    FolderContents,
    Protocol,
    Report,
    SkillChange,
    Tuning,
    load_report,
)
from dispfx.report.tuning_record import RECORD_FILE, adapter_card, write_record
from dispfx.run.folder_report import (
    PROBE_SAMPLES,
    PROBE_SEED,
    behaviour_of,
    device_name,
    perplexity_change,
    versions,
    write_pages,
)
from dispfx.run.folders import Opened, Written, open_folder
from dispfx.run.made_from import made_by_recovery
from dispfx.run.onnx_folder import write_onnx
from dispfx.run.plan_learning import resumption
from dispfx.run.recovery_job import Recovery, faster, training_of
from dispfx.run.timed_stages import Stages
from dispfx.run.trainables import Trainable, lowered_of, own_model, trainable_of
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.source.own_code import is_own_code, private_code
from dispfx.source.transformers_classes import code_of_class
from dispfx.verification.equivalence import (
    SHAPES_BT,
    ModuleDecoder,
    Verification,
    compare,
    compare_decoders,
    random_token_ids,
    require,
)
from dispfx.verification.graphs import exported_lines, tolerance_of, tolerance_of_module
from dispfx.words.preconditions import is_saved_again

# Of a folder's files these are made anew, or were true of the weights that it no longer has.
_NOT_COPIED = (
    "README.md", "report.json", "report.html", "eval.json", "eval.md", "speed.json", "speed.md",
    RECORD_FILE, weights.INDEX_FILE,
)  # fmt: skip
# Templates of a tokenizer with several, where transformers looks for them.
_CHAT_TEMPLATES = "additional_chat_templates"
# Lines of a report that compare files; those of the cut stay true of other weights.
_OF_FILES = ("reloaded", "onnx", "program.pt2", "dense", "gather-add = checkpoint", "folded", "merged")
_ADAPTERS = "adapters"


def recover_folder(job: Recovery, stages: Stages) -> Tuning:
    """Train the decoder of a folder and write OUT.

    Raises:
        PlanMismatchError: if the folder was compiled from another decoder.
        DispfxError: for everything in the input that cannot be used.
        VerificationError: if OUT does not compute what was trained; it is not written then.
    """
    with stages("open"):
        opened, second = job.opened(), job.second_text
        lowered, trainable, task = training_of(job, opened)
    with stages("measure"):
        before = _known(job.measured) or _before(job.compared(partial(module_logits, opened.decoder)))
    if job.resume:
        stages.observer.note(resumption(job.state))
    with stages("recover"):
        task = faster(task, job, stages.observer.note)
        run = recover(task, Keeping(job.state, job.resume, _watch(job.settings, stages)))
    trained = sum(one.numel() for one in task.student.trained.values())
    writer = Writer(job, opened, lowered, trainable, stages)
    return writer.write(_told(job, second.about.name, run, trained, before), run)


def _watch(settings: RecoverySettings, stages: Stages) -> Callable[[RecoveryStep], None]:
    def on_step(step: RecoveryStep) -> None:
        stages.observer.working("recovering", step.step, settings.steps, f"KL {step.loss:.4f}")

    return on_step


@dataclass(frozen=True)
class Before:
    """Perplexity on the first text and KL on the second one, of a decoder that is still to be trained."""

    perplexity: float
    protocol: Protocol
    kl: float
    tokens: int


def _before(found: Sequence[Comparison]) -> Before:
    first, second = found[0].pruned, found[-1].agreement
    return Before(first.value, Protocol(**first.protocol), second.kl_nats, second.tokens)


def _known(report: Report | None) -> Before | None:
    if report is None or report.perplexity is None or not report.behaviour:
        return None
    first, second = report.perplexity, report.behaviour[-1]
    return Before(first.pruned, first.protocol, second.kl, second.tokens)


def _told(job: Recovery, second: str, run: Recovered, trained: int, before: Before) -> Tuning:
    """Return the record of a run; what was reached is still what was before."""
    chosen = ("train", "rank", "alpha", "lr", "steps", "batch_size", "seq_len", "seed", "stream_weight")
    return Tuning(
        base=job.base or str(job.folder),
        dense=job.dense.name,
        data=job.text.learned_name,
        parameters=trained,
        before=before.perplexity,
        after=before.perplexity,
        protocol=before.protocol,
        kl_before=before.kl,
        kl_after=before.kl,
        kl_text=second,
        kl_tokens=before.tokens,
        kept=True,
        held_out=run.held_out,
        steps_done=len(run.steps),
        made_from=made_by_recovery(job),
        **{name: getattr(job.settings, name) for name in chosen},
    )


def _reached(told: Tuning, after: Sequence[Comparison]) -> Tuning:
    return replace(told, after=after[0].pruned.value, kl_after=after[-1].agreement.kl_nats)


class _NoBetter(Exception):
    """What was written is no closer to the dense decoder than what it was made from."""

    def __init__(self, kl: float):
        super().__init__()
        self.kl = kl


@dataclass(frozen=True, eq=False)
class Writer:
    """Writes OUT from what was trained, or from what it was made of where that is no worse."""

    job: Recovery
    opened: Opened
    lowered: Callable[[], Program]
    trainable: Trainable
    stages: Stages

    def write(self, told: Tuning, run: Recovered) -> Tuning:
        """Write OUT whole, verified and read back, and return what is told of it."""
        try:
            return self._written(told, run)
        except _NoBetter as worse:
            self.stages.observer.note(
                f"recovery did not help: KL on {told.kl_text or 'the second text'} was {told.kl_before:.4f} "
                f"and became {worse.kl:.4f}; the weights stay what they were"
            )
            return self._written(replace(told, kept=False), run)

    def _written(self, told: Tuning, run: Recovered) -> Tuning:
        with new_folder(self.job.path) as folder, private_code(folder):
            if self.job.settings.train == "lora" and not self.job.merge:
                told = self._adapters(folder, told)
            else:
                told = self._whole(folder, told)
            write_record(folder, told, run.steps)
        return told

    def _adapters(self, folder: Path, told: Tuning) -> Tuning:
        trained = self.trainable
        if not told.kept:  # new adapters change nothing
            trained = trainable_of(self.job.opened(), self.lowered, self.job.settings, self.job.dtype)
        save_adapters(trained.module, folder)
        adapted = load_adapters(own_model(self.opened), folder)
        told, _ = self._measured(told, adapted)
        card = adapter_card(told, self.job.path.name, own_code=is_own_code(adapted.get_base_model()))
        (folder / "README.md").write_text(card, encoding="utf-8")
        return told

    def _whole(self, folder: Path, told: Tuning) -> Tuning:
        with self.stages("fold"):
            trained, lines = self._changed(folder, told.kept)
        with self.stages("verify"):
            again = open_folder(folder, device=self.job.device, trust_remote_code=self.job.own_code)
            lines += self._reread(trained, again)
            require(*lines)
        told, after = self._measured(told, again.decoder)
        written = self._exported(again, lines, kept=told.kept)
        if is_saved_again(self.opened.path):
            self.stages.observer.note("the folder has no report that the recovered one could continue")
            return told
        with self.stages("digest"):
            files = digests(folder)
        with self.stages("measure"):
            skills = self._skills(partial(module_logits, again.decoder))
        report = self._report(folder, told, tuple(lines), after, files)
        cache = None if report.cache is None else report.cache.with_onnx(written.cache_bytes)
        report = replace(report, skills=skills, onnx_without_cache=written.no_cache, cache=cache)
        contents = FolderContents(
            self.job.path.name,
            as_modules=again.plan is not None and read_layout(folder) is not None,
            onnx=self.job.export == "onnx",
            tokenizer=again.tokenizer is not None,
            code=code_of_class(self.job.dense.model),
            own_code=is_own_code(again.decoder, again.tokenizer),
        )
        write_pages(folder, report, contents, self.job.dense, self.job.learned_from)
        return told

    def _measured(self, told: Tuning, decoder: nn.Module) -> tuple[Tuning, tuple[Comparison, ...]]:
        """Measure what was read back on all texts.

        Raises:
            _NoBetter: if KL on the second text has not fallen, and what was trained was to be kept.
        """
        with self.stages("measure"):
            after = self.job.compared(partial(module_logits, decoder))
        reached = _reached(told, after)
        if told.kept and not reached.kl_after < told.kl_before:
            raise _NoBetter(reached.kl_after)
        return reached, after

    def _changed(self, folder: Path, kept: bool) -> tuple[nn.Module, list[Verification]]:
        """Write the decoder's files; return what was trained, to be compared with what is read back."""
        if self.job.settings.train == "lora":
            return self._merged(folder, kept)
        values = self.trainable.values() if kept else {}
        lines = self.trainable.proof(values) if kept else []
        program = self._program(kept)
        if kept:
            tensors = {path: _parameter(values, path, tensor) for path, tensor in program.tensors()}
            program.rebuild(tensors)
        copy_files(self.opened.path, folder)
        if self.opened.plan is None:
            exported.save_graph(program.graph_module, folder)
        else:
            stored = self.opened.stored(values)
            write_stored(folder, self.opened.path, stored)
        return program.graph_module, lines

    def _program(self, kept: bool) -> Program:
        """Return the lowered program with what was trained, or as the folder has it."""
        # Training has changed the weights in place.
        return self.lowered() if kept else lowered_of(self.job.opened(), self.job.dense, self.job.program)

    def _merged(self, folder: Path, kept: bool) -> tuple[nn.Module, list[Verification]]:
        """Save the adapters, read them again, and add them to the weights."""
        layout = read_layout(self.opened.path)
        assert layout is not None
        place = folder / _ADAPTERS
        if kept:
            save_adapters(self.trainable.module, place)
            merged, lines = _added(
                load_adapters(own_model(self.opened), place), self.job.program.known_tokens
            )
            shutil.rmtree(place)
        else:
            merged, lines = own_model(self.opened), []
        copy_files(self.opened.path, folder)
        stored = PrunedModel(merged, layout)
        weights.write_tensors(folder, stored.stored_parameters(), stored.stored_buffers())
        return merged, lines

    def _reread(self, trained: nn.Module, again: Opened) -> list[Verification]:
        """Compare the folder's decoder, read back, with what was trained, and with its fast spelling."""
        alike = partial(
            compare_decoders, vocabulary_size=self.job.program.known_tokens, device=self.job.device
        )
        old, new = (ModuleDecoder(one) for one in (trained, again.decoder))
        tolerance = tolerance_of(self.job.program)
        same_form = self.job.settings.train == "lora"
        lines = alike("reloaded = recovered", old, new, 0.0 if same_form else tolerance)
        if again.program is not None:
            lines += alike("gather-add = checkpoint", new, again.fast(), tolerance)
        return lines

    def _exported(self, again: Opened, lines: list[Verification], *, kept: bool) -> Written:
        """Write the form that was asked for, and return what was written."""
        job = self.job
        if job.export == "none" or (job.export == "pt2" and again.plan is None):
            return Written([])
        batched = open_folder(
            again.path, device=job.device, trust_remote_code=job.own_code, experts="batched"
        )
        with self.stages(job.export):
            if job.export == "pt2":
                exported.save_graph(batched.graph_module, again.path)
                lines += exported_lines(again.path, again.decoder, job.program.known_tokens)
                require(*lines)
                return Written([])
            plain = lambda: gathered(self._program(kept)).graph_module  # noqa: E731
            written = write_onnx(batched, plain=plain if again.plan is None else None)
        lines += written.lines
        self.stages.say(written.notes)
        return written

    def _report(
        self,
        folder: Path,
        told: Tuning,
        lines: tuple[Verification, ...],
        after: tuple[Comparison, ...],
        files: dict[str, str],
    ) -> Report:
        """Return the report of OUT: the plan's figures, and what was measured on the new weights."""
        was = load_report(self.opened.path / "report.json")
        parameters, size = stored_size(folder)
        cut = tuple(line for line in was.verify if not line.name.startswith(_OF_FILES))
        return replace(
            was,
            parameters=replace(was.parameters, pruned=parameters),
            bytes=replace(was.bytes, pruned=size),
            perplexity=perplexity_change(after),
            behaviour=tuple(map(behaviour_of, after)),
            verify=(*cut, *lines),
            versions=versions(),
            device=device_name(self.job.device),
            seconds=dict(self.stages.seconds),
            settings=self.job.run_settings or was.settings,
            command=self.job.command or "dispfx.api.recover",
            tuned=told,
            files=files,
            quantized=(),
        )

    def _skills(self, decoder: Callable[[Tensor], Any]) -> dict[str, SkillChange]:
        """Probe the demo's skills; those of the dense decoder may be on record."""
        dense = self.job.dense
        if dense.origin != "demo":
            return {}
        words = (dense.tokenizer, PROBE_SEED, PROBE_SAMPLES)
        probe = partial(skill_probe, device=self.job.device)
        known = load_report(self.opened.path / "report.json").skills
        before = {name: skill.dense for name, skill in known.items()}
        before, after = before or probe(self.job.program.graph_module, *words), probe(decoder, *words)
        return {name: SkillChange(before[name], after[name]) for name in before}


def _parameter(values: Any, path: str, tensor: Tensor) -> Tensor:
    """Return the new value of a parameter of a graph, or the tensor as it is."""
    if path not in values:
        return tensor
    return nn.Parameter(values[path].detach(), requires_grad=False)


def write_stored(folder: Path, source: Path, stored: dict[str, Tensor]) -> None:
    """Write weight files; those tensors are buffers that are buffers in the files of `source`."""
    held = {name for name, header in weights.read_headers(source).items() if not header.is_parameter}
    parameters = {name: tensor for name, tensor in stored.items() if name not in held}
    buffers = {name: tensor for name, tensor in stored.items() if name in held}
    weights.write_tensors(folder, parameters, buffers)


def _added(adapted: Any, vocabulary_size: int) -> tuple[nn.Module, list[Verification]]:
    """Add the adapters to the weights, in place, and compare the result with what it was."""
    device = next(adapted.parameters()).device
    ids = [random_token_ids(vocabulary_size, shape, device=device) for shape in SHAPES_BT]
    with torch.no_grad():
        before = [module_logits(adapted, one) for one in ids]
        merged = adapted.merge_and_unload()
        tolerance = tolerance_of_module(merged)
        lines = [
            compare("merged = adapters", expected, module_logits(merged, one), tolerance)
            for one, expected in zip(ids, before, strict=True)
        ]
    return merged, lines


def copy_files(source: Path, target: Path) -> None:
    """Copy what stays true when weights change: config, tokenizer, plan, and the log of learning."""
    for file in source.iterdir():
        weight = file.suffix in (".safetensors", ".pt2") and file.name != PLAN_FILE
        if file.is_file() and not weight and file.name not in _NOT_COPIED:
            shutil.copyfile(file, target / file.name)
        elif file.is_dir() and file.name == _CHAT_TEMPLATES:
            shutil.copytree(file, target / file.name)
