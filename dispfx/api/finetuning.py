"""Recover what pruning has cost: LoRA on the decoder of an output folder.

    DIR, text → adapters → OUT            what PEFT reads, for DIR
                         → merged → OUT   a folder like DIR with other weights, verified and read back

The plan stays what it was.  What a compile proved about the original weights holds for DIR; of a merged
folder only what was compared anew is reported.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dispfx.capturing.module_capture import module_logits
from dispfx.deploy import weights
from dispfx.deploy.checkpoint import PLAN_FILE, implementations
from dispfx.deploy.digests import digests, stored_size
from dispfx.deploy.folder import new_folder, refuse_existing
from dispfx.deploy.section import read_layout
from dispfx.errors import OutputError
from dispfx.huggingface.adapter_training import Keeping, TuneStep, train
from dispfx.huggingface.adapters import (
    load_adapters,
    peft_library,
    save_adapters,
    with_adapters,
)
from dispfx.huggingface.model_loading import load_model
from dispfx.huggingface.saving import PrunedModel
from dispfx.learning.text import TokenBatches
from dispfx.quality.perplexity import Perplexity, measure
from dispfx.report import (
    FolderContents,
    NullObserver,
    Observer,
    Protocol,
    Report,
    Tuning,
    load_report,
    model_card,
    save_report,
)
from dispfx.report.page import write_page
from dispfx.report.tuning_record import RECORD_FILE, adapter_card, read_record, write_record
from dispfx.run.folder_report import device_name, versions
from dispfx.run.folders import Opened, open_folder
from dispfx.run.plan_learning import remove_state, resumption, state_folder
from dispfx.run.run_text import Text, TextChoice, open_text
from dispfx.run.timed_stages import Stages
from dispfx.settings.trees import FinetuneSettings
from dispfx.settings.verb_settings import TuneSettings
from dispfx.source import Source, dtype_of
from dispfx.source.own_code import is_own_code, private_code
from dispfx.source.source import longest_context
from dispfx.verification.equivalence import (
    SHAPES_BT,
    Verification,
    compare,
    compare_decoders,
    random_token_ids,
    require,
)
from dispfx.verification.graphs import TOLERANCES
from dispfx.words.preconditions import is_saved_again

# Of a merged folder's files these are made anew, or were true of the weights that it no longer has.
_NOT_COPIED = (
    "README.md", "report.json", "report.html", "eval.json", "eval.md", "speed.json", "speed.md",
    RECORD_FILE, weights.INDEX_FILE,
)  # fmt: skip
_ADAPTERS = "adapters"
_SEQ_LEN = 512


def finetune(
    folder: Any, *, observer: Observer | None = None, command: str | None = None, **changes: Any
) -> Tuning:
    """Train adapters on the decoder of an output folder, and write them, or a folder with them merged in.

    Args:
        folder: DIR of a compile, or `FinetuneSettings`.
        observer: told what happens.
        command: that gives this result again, for the report.
        changes: single settings, as in `data="text.txt", out="adapters", rank=32`.  `dtype` is that of the
            frozen weights while adapters are trained, by default that of the folder; adapters are float32 by
            default of PEFT, and what is written has the folder's dtype.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DispfxError: for everything in the input that cannot be used, PEFT missing among it.
        VerificationError: if the merged folder does not compute what adapters and DIR compute.
    """
    asked = FinetuneSettings.given(folder, changes)
    folder, output, settings = asked.model.model, asked.output, asked.tuning
    path, merge, resume = output.path, output.merge, output.resume
    stages = Stages(observer or NullObserver())
    if resume and (path / RECORD_FILE).is_file():
        stages.observer.note(f"{path} is complete; there is nothing to do")
        remove_state(state_folder(path, resume))
        return read_record(path)
    refuse_existing(path)
    state = state_folder(path, resume)
    peft_library()
    chosen = TextChoice(asked.text)
    chosen.check()
    opened = open_folder(
        folder, device=asked.model.device or "cpu", trust_remote_code=asked.model.trust_remote_code
    )
    _require_modules(opened)
    settings = fitted_tuning(settings, opened)
    with stages("open"):
        model = _decoder(opened, asked.model.dtype)
        fingerprint = _fingerprint(opened.path, next(model.parameters()).dtype)
        keeping = Keeping(state, fingerprint, output.save_every, resume)
        known = Source(model, opened.tokenizer, opened.config, str(folder), "folder")
        text = open_text(known, chosen)
    stages.say(text.notes)
    text.require_measurable()
    batches = TokenBatches(
        torch.cat(text.learn), settings.seq_len, settings.batch_size, settings.seed, bos=text.bos
    )
    gauge = partial(_measured, opened, text, asked.text.eval_windows)
    with stages("measure"):
        before = gauge(model)
    tuned = with_adapters(model, settings, str(folder))
    trained = sum(one.numel() for one in tuned.parameters() if one.requires_grad)
    if resume:
        stages.observer.note(resumption(state))
    with stages("tune"):
        log = train(tuned, batches, settings, torch.device(opened.device), _watch(settings, stages), keeping)
    with new_folder(path) as partial_folder, private_code(partial_folder):
        place = partial_folder / _ADAPTERS if merge else partial_folder
        save_adapters(tuned, place)
        del model, tuned
        adapted = load_adapters(_decoder(opened, None), place)
        with stages("measure"):
            after = gauge(adapted)
        told = Tuning(
            base=str(folder),
            data=text.learned_name,
            parameters=trained,
            before=before.value,
            after=after.value,
            protocol=Protocol(**before.protocol),
            **asdict(settings),
        )
        if merge:
            told = _write_merged(opened, adapted, partial_folder, path.name, told, gauge, stages, command)
        else:
            card = adapter_card(told, path.name, own_code=is_own_code(adapted.get_base_model()))
            (partial_folder / "README.md").write_text(card, encoding="utf-8")
        write_record(partial_folder, told, log)
    remove_state(state)
    return told


def fitted_tuning(settings: TuneSettings, opened: Opened) -> TuneSettings:
    """Return the settings with sequences that a decoder reads, where nobody chose their length."""
    if settings.seq_len is not None:
        return settings
    return replace(settings, seq_len=min(_SEQ_LEN, longest_context(opened.config)))


def _require_modules(opened: Opened) -> None:
    if opened.plan is None or read_layout(opened.path) is None:
        raise OutputError(
            "fine-tuning needs a folder that transformers loads, and this one holds a graph",
            where=str(opened.path),
        )


def _decoder(opened: Opened, dtype: str | None) -> nn.Module:
    """Return the folder's decoder anew, in its own dtype or another."""
    chosen = {} if dtype is None else {"dtype": dtype_of(dtype)}
    return load_model(
        opened.path,
        device=opened.device,
        trust_remote_code=opened.trust_remote_code,
        **implementations(opened.path),
        **chosen,
    )


def _measured(opened: Opened, text: Text, windows: int | None, decoder: nn.Module) -> Perplexity:
    assert text.measure is not None
    return measure(
        partial(module_logits, decoder),
        text.measure,
        context=longest_context(opened.config),
        windows=windows,
        device=opened.device,
        text=text.about,
    )


def _fingerprint(folder: Path, dtype: torch.dtype) -> str:
    """Identify the decoder that adapters are trained on; forms that are exported later do not count."""
    found = digests(folder, "model*") | digests(folder, "config.json") | {"dtype": str(dtype)}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _watch(settings: TuneSettings, stages: Stages) -> Callable[[TuneStep], None]:
    def on_step(step: TuneStep) -> None:
        stages.observer.working("tuning", step.step, settings.steps, f"loss {step.loss:.3f}")

    return on_step


def _write_merged(
    opened: Opened,
    adapted: Any,
    folder: Path,
    name: str,
    told: Tuning,
    gauge: Any,
    stages: Stages,
    command: str | None,
) -> Tuning:
    """Write a whole folder with the adapters merged in, read it back, verify and measure it."""
    layout = read_layout(opened.path)
    assert layout is not None
    alike = partial(compare_decoders, vocabulary_size=opened.vocabulary_size, device=opened.device)
    with stages("merge"):
        merged, lines = _merged(opened, adapted)
    shutil.rmtree(folder / _ADAPTERS)
    with stages("write"):
        _copy_files(opened.path, folder)
        stored = PrunedModel(merged, layout)
        weights.write_tensors(folder, stored.stored_parameters(), stored.stored_buffers())
    with stages("verify"):
        again = open_folder(folder, device=opened.device, trust_remote_code=opened.trust_remote_code)
        old, new = (partial(module_logits, one) for one in (merged, again.decoder))
        lines += alike("reloaded = tuned", old, new, 0.0)
        lines += alike("gather-add = checkpoint", new, again.fast(), _tolerance(merged))
        require(*lines)
    with stages("measure"):
        told = replace(told, after=gauge(again.decoder).value)
    if is_saved_again(opened.path):
        stages.observer.note("the folder has no report that the merged one could continue")
        return told
    with stages("digest"):
        files = digests(folder)
    report = _report(opened, folder, told, tuple(lines), files, stages, command)
    save_report(report, folder / "report.json")
    card = model_card(
        report,
        FolderContents(
            name, tokenizer=opened.tokenizer is not None, own_code=is_own_code(merged, opened.tokenizer)
        ),
        base_model=told.base,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_page(folder, name)
    return told


def _merged(opened: Opened, adapted: Any) -> tuple[nn.Module, list[Verification]]:
    """Add the adapters to the weights, in place, and compare the result with what it was."""
    ids = [random_token_ids(opened.vocabulary_size, shape, device=opened.device) for shape in SHAPES_BT]
    with torch.no_grad():
        before = [module_logits(adapted, one) for one in ids]
        merged = adapted.merge_and_unload()
        tolerance = _tolerance(merged)
        lines = [
            compare("merged = adapters", expected, module_logits(merged, one), tolerance)
            for one, expected in zip(ids, before, strict=True)
        ]
    return merged, lines


def _tolerance(model: nn.Module) -> float:
    return TOLERANCES.get(next(model.parameters()).dtype, 1e-4)


def _copy_files(source: Path, target: Path) -> None:
    """Copy what stays true when weights change: config, tokenizer, plan, and the log of learning."""
    for file in source.iterdir():
        weight = file.suffix in (".safetensors", ".pt2") and file.name != PLAN_FILE
        if file.is_file() and not weight and file.name not in _NOT_COPIED:
            shutil.copyfile(file, target / file.name)


def _report(
    opened: Opened,
    folder: Path,
    told: Tuning,
    lines: tuple[Verification, ...],
    files: dict[str, str],
    stages: Stages,
    command: str | None,
) -> Report:
    """Return the report of a merged folder: the plan's figures, and what was measured on the new weights."""
    was = load_report(opened.path / "report.json")
    parameters, size = stored_size(folder)
    return replace(
        was,
        parameters=replace(was.parameters, pruned=parameters),
        bytes=replace(was.bytes, pruned=size),
        # That of the weights before; the dense decoder was not measured on this text.
        perplexity=None,
        skills={},
        verify=lines,
        versions=versions(),
        device=device_name(torch.device(opened.device)),
        seconds=dict(stages.seconds),
        command=command or "dispfx.api.finetune",
        tuned=told,
        onnx_without_cache=None,
        files=files,
    )
