"""A folder to recover: the decoders, the texts, and what training needs of them.

    DIR → lowered program or model with adapters → student          dense decoder → teacher
    data → batches, and its held-out end          text to measure on → second text

Held-out text says when training ends; the second text says whether its result is kept.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispfx.analysis.finite_weights import require_finite_weights
from dispfx.analysis.lookups import longest_text, require_readable
from dispfx.compiler.pipelines import for_recovery
from dispfx.deploy.digests import identity_of
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DataError
from dispfx.fast_decoder.recovery_pass import fastest_pass
from dispfx.ir.content_digest import content_digest, program_digest
from dispfx.ir.program import Program
from dispfx.learning.distillation import Keeping, RecoveryTask, recover
from dispfx.learning.text import Batches
from dispfx.plan.plan import require_same_decoder
from dispfx.quality.agreement import Comparison
from dispfx.report import Report
from dispfx.run.folders import Opened, open_folder
from dispfx.run.length_checks import hold_to_readable
from dispfx.run.preflight import require_room_to_recover
from dispfx.run.run_text import MeasuredText, Text, split_held_out
from dispfx.run.students import graph_predictions, has_stream
from dispfx.run.trainables import (
    Trainable,
    folder_plan,
    lowered_of,
    require_compiled_from,
    trainable_of,
)
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.source import Source
from dispfx.source.source import context_of
from dispfx.words.option_names import option

# Held-out text is measured again and again.
_MOST_HELD_OUT_TOKENS, _FEWEST_HELD_OUT = 2**15, 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Recovery:
    """One folder to recover.

    Args:
        folder: written by dispfx.
        path: OUT.
        state: where the state is kept.
        dense: what `folder` was compiled from.
        program: of `dense`.
        text: to learn from and to measure on.
        context: tokens per window to measure on.
        windows: to measure on at most.
        settings: of the training, fitted.
        measured: report of `folder`, where its figures are those of the same texts and windows.
        run_settings: those of a compile, for its report; by default what the report of `folder` has.
        export: form that is written next to the checkpoint: none, onnx or pt2.
        learned_from: name of what the masks were learned from, if that is known.
        base: what the record says that was trained; `folder` by default.
        merge: of adapters: write a whole folder.
        resume: go on from a state.
        dtype: of the frozen weights under adapters.
        own_code: whether code that comes with the folder may run.
        ranks: the processes of the run; all train.
        command: that reproduces this result.
    """

    folder: Path
    path: Path
    state: Path
    dense: Source
    program: Program
    text: Text
    settings: RecoverySettings
    context: int
    windows: int | None = None
    measured: Report | None = None
    run_settings: Mapping[str, Any] | None = None
    export: str = "none"
    learned_from: str = ""
    base: str = ""
    merge: bool = True
    resume: bool = False
    dtype: str | None = None
    own_code: bool = False
    ranks: Ranks = ALONE
    command: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the decoders are."""
        return self.program.device

    @property
    def second_text(self) -> MeasuredText:
        """What the recovered decoder must not be worse on."""
        return second_text_of(self.text)

    def compared(self, decoder: Callable[[Tensor], Any]) -> tuple[Comparison, ...]:
        """Compare a decoder with the dense one on all texts, the second text last."""
        return self.text.compared(self.program, decoder, context=self.context, windows=self.windows)

    def opened(self) -> Opened:
        """Return the folder's decoder."""
        return open_folder(self.folder, device=self.device, trust_remote_code=self.own_code)


def second_text_of(text: Text) -> MeasuredText:
    """Return the text that a recovered decoder must not be worse on: the last one of those measured.

    It is the project's text of many kinds, unless the user named several or the tokenizer does not know it.

    Raises:
        DataError: if no text is measured on.
    """
    if not text.measured:
        raise DataError(
            "recovery needs text to measure on",
            hint=f"name a text with {option('data')} or {option('eval_data')}",
        )
    return text.measured[-1]


def train_along(job: Recovery) -> None:
    """Train with the rank that calls `recover_folder` with the same job.

    Raises:
        RankLost: if another rank ended.
    """
    _, _, task = training_of(job, job.opened())
    recover(faster(task, job), Keeping(job.state, job.resume))


def faster(
    task: RecoveryTask, job: Recovery, note: Callable[[str], None] = lambda text: None
) -> RecoveryTask:
    """Return the task with the fastest pass that agrees with the plain one; `note` is told of it."""
    return replace(task, faster=fastest_pass(task, job.program.dtype, note))


def training_of(job: Recovery, opened: Opened) -> tuple[Callable[[], Program], Trainable, RecoveryTask]:
    plan = folder_plan(opened)
    require_same_decoder(job.program, plan)
    made: list[Program] = []

    def lowered() -> Program:
        if not made:
            made.append(lowered_of(opened, job.dense, job.program))
        return made[0]

    trainable = trainable_of(opened, lowered, job.settings, job.dtype)
    require_finite_weights(trainable.module)
    require_compiled_from(opened, job.dense, job.program)
    trained = trainable.student.trained.values()
    dtype = next((one.dtype for one in trained), torch.float32)
    require_room_to_recover(sum(one.numel() for one in trained), dtype, job.device)
    teacher = for_recovery(job.program, job.settings.seq_len)
    teacher.graph_module.requires_grad_(False)
    text = recovery_batches(job.text, job.settings)
    held_out = text.held_out_batches(held_out_sequences(job.settings))
    if not held_out:
        raise DataError(
            f"held-out text needs {job.settings.seq_len} tokens or more, and the last tenth of the data has "
            f"{max(map(len, _with_ends(job.text).held_out)):,}",
            where=job.text.learned_name,
            hint=f"use more text, or a smaller {option('seq_len')}",
        )
    task = RecoveryTask(
        student=trainable.student,
        teacher=graph_predictions(teacher, with_stream=bool(job.settings.stream_weight)),
        decoder=_fingerprint(job),
        text=text,
        held_out=held_out,
        settings=job.settings,
        device=job.device,
        ranks=job.ranks,
    )
    return lowered, trainable, task


def held_out_sequences(settings: RecoverySettings) -> int:
    """Return how many sequences are measured: a quarter of what is learned from between two measurements."""
    learned = settings.measure_every * settings.batch_size
    most = max(1, _MOST_HELD_OUT_TOKENS // settings.seq_len)
    return min(most, max(_FEWEST_HELD_OUT, learned // 4))


def recovery_batches(text: Text, settings: RecoverySettings) -> Batches:
    """Cut the text into batches; the end of every part is held out, whatever is measured on.

    Raises:
        DataError: if a part is shorter than one sequence.
    """
    # Documents are not kept apart: the decoders are captured without that mask.
    return replace(_with_ends(text), separator=None).batches(settings)


def longest_sequence(text: Text, context: int) -> int:
    """Return how many tokens a sequence may have.

    They are what the decoder reads, no more than the longest held-out end has, and no more than every text
    has.
    """
    ends = _with_ends(text)
    longest = min(max(map(len, ends.held_out)), *map(len, ends.learn))
    return max(2, min(context, longest + len(text.bos)))


def fitted_recovery(
    settings: RecoverySettings, source: Source, program: Program, text: Text
) -> RecoverySettings:
    """Return the settings of a recovery with nothing left open.

    Args:
        source: of the dense decoder.
        program: of it.

    Raises:
        DataError, CaptureError: if a chosen length is more than the decoder reads.
        DispfxError: if the streams were to be compared and cannot be.
    """
    hold_to_readable(source, program, settings.seq_len or context_of(source))
    if settings.seq_len is not None:
        require_readable(program, settings.seq_len)
    longest = longest_sequence(text, longest_text(program, program.lengths.within(context_of(source))))
    return settings.fitted(longest, demo=source.origin == "demo", stream=has_stream(program))


def _with_ends(text: Text) -> Text:
    """Return the text to learn from with the end of each part held out, whatever is measured on."""
    if text.about.held_out_share is not None:
        return text
    learn, held_out = zip(*map(split_held_out, text.learn), strict=True)
    return replace(text, learn=learn, held_out=held_out)


def _fingerprint(job: Recovery) -> str:
    """Identify the two decoders."""
    return content_digest((str(identity_of(job.folder)), program_digest(job.program), str(job.dtype)))
