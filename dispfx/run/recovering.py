"""A folder to recover: the decoders, the texts, and what training needs of them.

    DIR → lowered program or model with adapters → student          dense decoder → teacher
    data → batches, and its held-out end          text to measure on → second text

Held-out text says when training ends; the second text says whether its result is kept.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dispfx.compiler.programs import require_same_decoder
from dispfx.compiler.stages import for_training
from dispfx.deploy import exported
from dispfx.deploy.digests import digests
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DataError
from dispfx.ir.program import Program
from dispfx.learning.recovery import Keeping, RecoveryTask, recover
from dispfx.learning.text import TokenBatches
from dispfx.quality.agreement import Agreement, agreement
from dispfx.quality.measuring import measure
from dispfx.quality.perplexity import Perplexity
from dispfx.run.folders import Opened, open_folder
from dispfx.run.length_checks import window_of
from dispfx.run.pupils import Pupil, folder_plan, lowered_of, pupil_of
from dispfx.run.run_text import Text, split_held_out
from dispfx.run.students import graph_predictions
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.source import Source

# Held-out text is measured again and again, the second text twice.
_MOST_HELD_OUT_TOKENS = 2**15
_MOST_COMPARED_TOKENS = 2**16


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
        windows: to measure perplexity on at most.
        settings: of the training, fitted.
        export: form that is written next to the checkpoint: none, onnx or pt2.
        learned_from: name of what the masks were learned from, if that is known.
        base: what the record says that was trained; `folder` by default.
        merge: of adapters: write a whole folder.
        resume: go on from a state.
        dtype: of the frozen weights under adapters.
        own_code: whether code that comes with the folder may run.
        ranks: the processes of the run, all of which train.
        command: that gives this result again.
    """

    folder: Path
    path: Path
    state: Path
    dense: Source
    program: Program
    text: Text
    settings: RecoverySettings
    windows: int | None = None
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
    def context(self) -> int:
        """Tokens per window of perplexity."""
        return window_of(self.dense, self.program, None)

    @property
    def second_text(self) -> "SecondText":
        """What the recovered decoder must not be worse on."""
        return second_text_of(self.text)

    def opened(self) -> Opened:
        """Return the folder's decoder."""
        return open_folder(self.folder, device=self.device, trust_remote_code=self.own_code)


@dataclass(frozen=True)
class SecondText:
    """The text that decides whether recovered weights are kept."""

    name: str
    tokens: Tensor
    bos: tuple[int, ...]


def second_text_of(text: Text) -> SecondText:
    """Return what the recovered decoder must not be worse on: the text to measure on.

    Raises:
        DataError: if there is none.
    """
    if text.measure is None:
        raise DataError("recovery needs text to measure on", hint="name a text with --eval-data or --data")
    return SecondText(text.about.name, text.measure[:_MOST_COMPARED_TOKENS], text.about.bos)


def train_along(job: Recovery) -> None:
    """Train with the rank that calls `recover_folder` with the same job.

    Raises:
        RankLost: if another rank ended.
    """
    _, _, task = training_of(job, job.opened())
    recover(task, Keeping(job.state, job.resume))


def training_of(job: Recovery, opened: Opened) -> tuple[Callable[[], Program], Pupil, RecoveryTask]:
    plan = folder_plan(opened)
    require_same_decoder(job.program, plan)
    made: list[Program] = []

    def lowered() -> Program:
        if not made:
            made.append(lowered_of(opened, job.dense, job.program))
        return made[0]

    pupil = pupil_of(opened, lowered, job.settings, job.dtype)
    teacher = for_training(job.program, job.settings.seq_len)
    teacher.graph_module.requires_grad_(False)
    text = _batches(job)
    count = max(1, _MOST_HELD_OUT_TOKENS // job.settings.seq_len)
    held_out = text.held_out_batches(count)
    if not held_out:
        raise DataError(
            f"held-out text needs {job.settings.seq_len} tokens or more, and the last tenth of the data has "
            f"{0 if text.held_out is None else len(text.held_out):,}",
            where=job.text.learned_name,
            hint="use more text, or a smaller --seq-len",
        )
    task = RecoveryTask(
        student=pupil.student,
        teacher=graph_predictions(teacher),
        decoder=_fingerprint(job, opened),
        text=text,
        held_out=held_out,
        settings=job.settings,
        device=job.device,
        ranks=job.ranks,
    )
    return lowered, pupil, task


def _batches(job: Recovery) -> TokenBatches:
    """Cut the text into batches; the end of the data is held out, whatever is measured on."""
    text, settings = job.text, job.settings
    learn, held_out = text.learn, text.held_out
    if text.about.held_out_share is None:
        learn, held_out = zip(*map(split_held_out, learn), strict=True)
    sizes = settings.seq_len, settings.batch_size, settings.seed
    return TokenBatches(torch.cat(learn), *sizes, torch.cat(held_out), bos=text.bos)


def _fingerprint(job: Recovery, opened: Opened) -> str:
    """Identify the two decoders; forms that are exported later do not count."""
    found = digests(opened.path, "model*") | digests(opened.path, "config.json")
    if opened.plan is None:
        found |= digests(opened.path, exported.PROGRAM_FILE)
    found |= {"dense": job.program.fingerprint, "dtype": str(job.dtype)}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


class Gauge:
    """Measures decoders on the texts of a job."""

    def __init__(self, job: Recovery):
        self._job = job
        self.second = job.second_text
        self._dense = job.program.graph_module

    def perplexity(self, decoder: Callable[[Tensor], Any]) -> Perplexity:
        """Return the perplexity on the text to measure on."""
        assert self._job.text.measure is not None
        return measure(
            decoder,
            self._job.text.measure,
            context=self._job.context,
            windows=self._job.windows,
            device=self._job.device,
            text=self._job.text.about,
        )

    def dense_perplexity(self) -> Perplexity:
        """Return that of the dense decoder."""
        return self.perplexity(self._dense)

    def agreement(self, decoder: Callable[[Tensor], Any]) -> Agreement:
        """Return how alike a decoder and the dense one predict the second text."""
        return agreement(
            self._dense,
            decoder,
            self.second.tokens,
            context=self._job.context,
            device=self._job.device,
            bos=self.second.bos,
        )
