"""`recover`: train the decoder of an output folder to predict what the dense one predicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dispfx.compiler.programs import only_planned
from dispfx.deploy.folder import refuse_existing
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.huggingface.adapters import peft_library
from dispfx.report import Observer, Tuning
from dispfx.report.tuning_record import RECORD_FILE
from dispfx.run.complete_output import complete_recovery
from dispfx.run.folders import open_folder, require_unchanged
from dispfx.run.length_checks import window_of
from dispfx.run.opening import open_model
from dispfx.run.plan_learning import held_state, remove_state, state_folder
from dispfx.run.readiness import analysed
from dispfx.run.recovered_folder import recover_folder
from dispfx.run.recovery_job import Recovery, fitted_recovery, train_along
from dispfx.run.run_text import TextChoice, open_text, require_one_tokenizer, require_tokens
from dispfx.run.timed_stages import Stages
from dispfx.run.trainables import folder_plan, stored_dtype
from dispfx.settings.trees import RecoverSettings
from dispfx.words.chosen_device import local_device


def recover(
    folder: Any, *, observer: Observer | None = None, command: str | None = None, **changes: Any
) -> Tuning:
    """Win back what pruning has cost: train a pruned decoder towards the dense one, by KL, and write it.

    Args:
        folder: DIR of a compile, or `RecoverSettings`.
        observer: told what happens.
        command: that gives this result again, for the report.
        changes: single settings, as in `dense="demo", data="text.txt", out="recovered", train="scales"`.
            `dtype` is that of the frozen weights under adapters; everything else has the folder's dtype.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        PlanMismatchError: if `dense` is not what DIR was compiled from.
        DispfxError: for everything in the input that cannot be used, PEFT missing among it.
        VerificationError: if what is written does not compute what was trained.
    """
    return run_recover(RecoverSettings.given(folder, changes), observer, command=command)


@torch.inference_mode(False)
@torch.enable_grad()
def run_recover(
    settings: RecoverSettings,
    observer: Observer | None = None,
    *,
    ranks: Ranks = ALONE,
    command: str | None = None,
) -> Tuning:
    """As `recover`, with all settings in one object.

    Args:
        ranks: the processes of the run; this one leads, and all other ones call `follow_recovery`.

    Raises:
        DispfxError, VerificationError: as `recover`.
    """
    output = RecoverSettings.required(settings).output
    path, resume = output.path, output.resume
    stages = Stages(observer)
    if resume and (path / RECORD_FILE).is_file():
        return complete_recovery(settings, _job(settings, state_folder(path, resume), stages, ranks), stages)
    refuse_existing(path)
    with held_state(path, resume) as state:
        job = replace(_job(settings, state, stages, ranks), command=command)
        told = recover_folder(job, stages)
        remove_state(state)
    return told


def follow_recovery(settings: RecoverSettings, ranks: Ranks) -> None:
    """Take part in the training of a process that calls `run_recover` with the same settings.

    Raises:
        RankLost: if another process ended.
        DispfxError: as `recover`.
    """
    if settings.output.resume and (settings.output.path / RECORD_FILE).is_file():
        return
    # The leading rank may have begun to write it.
    state = state_folder(settings.output.path, True)
    train_along(_job(settings, state, Stages(), ranks))


def _job(settings: RecoverSettings, state: Path, stages: Stages, ranks: Ranks) -> Recovery:
    """Open the two decoders and the text.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    training, chosen = settings.recovery, TextChoice(settings.text)
    if training.train == "lora":
        peft_library()
    chosen.check()
    model = replace(settings.model, device=local_device(settings.model.device))
    folder = Path(model.model).expanduser()
    with stages("open"):
        opened = open_folder(folder, trust_remote_code=model.trust_remote_code)
        require_unchanged(opened.path)
        plan = folder_plan(opened)
        # In the dtype of the folder: what the plan's fingerprint was taken of.
        source = open_model(replace(model, model=settings.teacher.dense, dtype=stored_dtype(opened)))
        require_one_tokenizer(opened.tokenizer, source.tokenizer, ours_of=str(folder), theirs_of=source.name)
        text = open_text(source, chosen)
    stages.say(text.notes)
    text.require_learnable()
    text.require_measurable()
    program = only_planned(analysed(source, stages, plan), plan)
    require_tokens(source, text, program.text_tokens)
    return Recovery(
        folder=folder,
        path=settings.output.path,
        state=state,
        dense=source,
        program=program,
        text=text,
        settings=fitted_recovery(training, source, program, text),
        context=window_of(source, program, None),
        windows=settings.text.eval_windows,
        merge=settings.output.merge,
        resume=settings.output.resume,
        dtype=model.dtype,
        own_code=model.trust_remote_code,
        ranks=ranks,
    )
