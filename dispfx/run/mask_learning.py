"""From a program and tokens to a plan: learn masks, or score features once."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dispfx.analysis.finite_weights import require_values
from dispfx.analysis.lookups import require_readable
from dispfx.compiler.programs import gate
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import BudgetError, DispfxError, PassError, UnsupportedGraphError, memory_shortage
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.ir.content_digest import program_digest
from dispfx.ir.program import Program, is_zero, require_program
from dispfx.learning.learner import Gated
from dispfx.learning.records import StepRecord
from dispfx.learning.scores import select_by_score
from dispfx.learning.text import Batches, TokenBatches, token_vector
from dispfx.learning.trainer import Learned, LearningTask, Watch, follow_run
from dispfx.learning.trainer import learn as learn_masks
from dispfx.plan.budget import Budget, require_range
from dispfx.plan.decoder_count import count_of
from dispfx.plan.family import Family
from dispfx.plan.hardening import fitting_budget
from dispfx.plan.knots import Knots
from dispfx.plan.plan import Plan, require_same_decoder
from dispfx.run.fitting import fitted_settings, settings_for
from dispfx.run.learning_setup import device_of_learning, prepared_loss
from dispfx.settings import BudgetSettings, ComputeSettings, LearnSettings, changed_settings, learn_settings
from dispfx.settings.field import refuse_unknown_names
from dispfx.settings.sections import UNALIGNED
from dispfx.words.chosen_device import require_default_device
from dispfx.words.given import require_given
from dispfx.words.option_names import option
from dispfx.words.own_function import is_identity, names_function, shown

_OF_BUDGET = ("ratio_of", "align", "costs", "kv_ratio", "constraint")


Data = Tensor | np.ndarray | Sequence[int] | Batches


@torch.inference_mode(False)
@torch.enable_grad()
def learn(
    program: Program,
    data: Data,
    ratio: float | None = None,
    *,
    settings: LearnSettings | None = None,
    compute: ComputeSettings | None = None,
    watch: Watch | None = None,
    ranks: Ranks | None = None,
    **changes: Any,
) -> Plan:
    """Learn which features every site keeps, and return the plan (arXiv 2410.11988).

    With a `method` other than `learned` in the settings nothing is learned: features are scored once.

    Args:
        program: of the decoder, on the device to learn on.
        data: token ids, (N,) integers, as a tensor, numpy array or list, whose last tenth is held out; or
            batches that are already cut as the settings say.
        ratio: share of the counted parameters to remove, in (0, 1).  With a `constraint` it may be left out.
        settings: of the learning; those of the `informed` recipe by default.
        compute: how the decoder is run: compiled, with checkpoints, sharded; the default suits the device.
        watch: where the state is kept, and the observer.
        ranks: the processes of the run, led by this one; all other processes call `follow`.
        changes: single settings of learning and budget, as in `steps=100, align=16, ratio_of="total"`; widths
            are not aligned by default.  `kv_ratio` needs a program that was captured with `sites="heads"`.
            `start` may be a plan to start from.

    If memory runs out in the first step, learning starts once more with layers computed again in the backward
    pass, unless `compute` says otherwise.  The masks are the same.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        PlanMismatchError: if the plan to start from was made for another decoder.
        BudgetError: if a ratio is no number, or the sites cannot meet it.
        SourceError: if the weights have no values.
        DataError: if the data is not a vector of token ids, has ids that the decoder does not know, or is
            shorter than one sequence.
        DispfxError: if the decoder cannot be run as `compute` requests, or the default device of torch is not
            the CPU.
    """
    _require_kinds(settings, compute, watch)
    if ranks is not None:
        require_given(ranks, Ranks, "leave it out, or pass Ranks(…)")
    if isinstance(ratio, str):
        raise BudgetError(
            f"a plan has one ratio, and {ratio!r} was given", hint="learn a range with dispfx.learn_family"
        )
    watch = watch or Watch()
    job = _job(program, data, ratio, settings, changes, watch.note)
    return learn_within(replace(job, compute=compute or ComputeSettings(), ranks=ranks or ALONE), watch)


@torch.inference_mode(False)
@torch.enable_grad()
def learn_family(
    program: Program,
    data: Data,
    ratios: tuple[float, float],
    *,
    settings: LearnSettings | None = None,
    compute: ComputeSettings | None = None,
    watch: Watch | None = None,
    **changes: Any,
) -> Family:
    """Learn in one run which features every site keeps at any ratio of a range.

    A smaller decoder keeps only what a larger one keeps.

    Every mask of a step is drawn for a ratio of its own, and logits are linear between the knots of the range
    (`dispfx.plan.knots`).  Slimmable networks (arXiv 1812.08928) are trained for several sizes in that way.

    Args:
        ratios: the smallest and the largest share of the counted parameters to remove, in (0, 1).
        data: token ids, (N,) integers, or batches, as for `learn`.
        program, settings, compute, watch, changes: as for `learn`.

    Raises:
        BudgetError: if the ratios are no range, or the sites cannot meet one of them.
        DispfxError: as `learn`; or if the settings score features, or count a cost of the user.
    """
    refuse_unknown_names(changes, (*LearnSettings.__dataclass_fields__, *_OF_BUDGET))
    _require_kinds(settings, compute, watch)
    watch = watch or Watch()
    low, high = require_range(ratios)
    job = _job(program, data, f"{low!r}:{high!r}", settings, changes, watch.note)
    knots = Knots.of_range(low, high)
    return learn_family_within(replace(job, compute=compute or ComputeSettings(), knots=knots), watch)


def _require_kinds(settings: object, compute: object, watch: object) -> None:
    for one, kind in ((settings, LearnSettings), (compute, ComputeSettings), (watch, Watch)):
        if one is not None:
            require_given(one, kind, f"leave it out, or pass {kind.__name__}(…)")


def _job(
    program: Program,
    data: Data,
    ratio: float | str | None,
    settings: LearnSettings | None,
    changes: dict[str, Any],
    note: Callable[[str], None],
) -> "LearningJob":
    """Return what masks are learned for, from what `learn` is given."""
    require_default_device()
    start_from = None
    if isinstance(start := changes.get("start"), Plan):
        require_same_decoder(program, start)
        start_from = start.for_sites(program.sites)
        changes["start"] = "uniform"
    # All other settings of a budget act before learning, on the program.
    of_budget = {name: changes.pop(name) for name in _OF_BUDGET if name in changes}
    whole = learn_settings(None, **changes) if settings is None else changed_settings(settings, changes)
    asked = BudgetSettings(ratio=ratio, **of_budget)
    require_program(program)
    if hasattr(data, "held_out_batches"):  # already cut
        chosen, text = settings_for(program, whole, note), cast(Batches, data)
    else:
        tokens = token_vector(data, program.text_tokens)
        chosen = fitted_settings(whole, program=program, note=note)
        text = batches_of(tokens, chosen)
    return LearningJob(
        program=program,
        text=text,
        budget=fitting_budget(Budget.of_settings(asked, UNALIGNED), program, constrained=chosen.constrained),
        settings=chosen,
        compute=ComputeSettings(),
        start_from=start_from,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class LearningJob:
    """What masks are learned for.

    Args:
        program: of the decoder.
        text: batches that are cut as the settings say.
        budget: of the plan.
        settings: of the learning.
        compute: how the decoder is run.
        ranks: the processes of the run.
        start_from: kept indices of every site to start from.
        knots: of a range of ratios; the budget has the largest.
    """

    program: Program
    text: Batches
    budget: Budget
    settings: LearnSettings
    compute: ComputeSettings
    ranks: Ranks = ALONE
    start_from: Sequence[Tensor] | None = None
    knots: Knots | None = None

    def task(self, note: Callable[[str], None] = lambda text: None) -> LearningTask:
        """Return the learning problem, with the decoder prepared to run."""
        gated = prepared_loss(
            self.program, self.text, self.settings, self.compute, ranks=self.ranks, note=note
        )
        return replace(
            task_of(self.program, gated, self.text, self.budget, self.settings),
            device=device_of_learning(self.program, self.compute),
            ranks=self.ranks,
            fingerprint=program_digest(self.program),
            dtype=self.program.dtype,
            start_from=self.start_from,
            knots=self.knots,
        )


def learn_within(job: LearningJob, watch: Watch) -> Plan:
    """As `learn`, from batches that are already cut."""
    program, settings = job.program, job.settings
    _require_learnable(job)
    if settings.method != "learned":
        if job.compute.shard_on is not None:
            raise DispfxError(
                f"{option('shard')} is for learning, and "
                f"{option('method', shown(settings.method))} scores features once",
                hint=f"leave out {option('shard')}",
            )
        if job.start_from is not None:
            raise DispfxError(
                f"method {shown(settings.method)} scores features once, and cannot start from a plan"
            )
        return Plan.of(program, job.budget, _scored(job, watch), settings.seed)
    return Plan.of(program, job.budget, _learned_or_explained(job, watch).kept, settings.seed)


def learn_family_within(job: LearningJob, watch: Watch) -> Family:
    """As `learn_family`, from batches that are already cut."""
    settings, knots = job.settings, job.knots
    assert knots is not None
    _require_learnable(job)
    require_one_method(settings, job.budget)
    found = _learned_or_explained(job, watch)
    return Family.of(
        job.program, job.budget, knots, found.logits, seed=settings.seed, constrained=settings.constrained
    )


def require_one_method(settings: LearnSettings, budget: Budget | BudgetSettings) -> None:
    """Raise for settings that a range of ratios cannot have.

    Raises:
        DispfxError: if features are scored, a cost of the user is counted, or a latency table is given.
    """
    of = budget.of if isinstance(budget, Budget) else budget.ratio_of
    if settings.method != "learned":
        name, reason = "method", f"{option('method', shown(settings.method))} scores features once"
    elif names_function(of) or is_identity(of):
        name, reason = "ratio_of", f"{shown(of)} is a cost of your own"
    elif budget.costs is not None:
        name, reason = "costs", f"{option('costs')} keeps other branches dense at every ratio"
    else:
        return
    raise DispfxError(
        f"a family for a range of ratios cannot be learned: {reason}",
        hint=f"leave out {option(name)}, or give one ratio",
    )


def _require_learnable(job: LearningJob) -> None:
    require_values(job.program.tensors())
    require_readable(job.program, job.text.seq_len)
    _check_packing(job.program, job.settings)


def _learned_or_explained(job: LearningJob, watch: Watch) -> Learned:
    try:
        return _learned(job, watch)
    except PassError as error:
        raise (_of_zeros(job.program) or error) from None


def _of_zeros(program: Program) -> UnsupportedGraphError | None:
    """Return why gates do not act, where a branch has a weight of zeros: the fault is not the compiler's."""
    tensors = dict(program.tensors())
    zeros = {
        site.branch: cut.parameter
        for site in program.sites
        for cut in site.slices
        if is_zero(tensors[cut.parameter])
    }
    if not zeros:
        return None
    return UnsupportedGraphError(
        "nothing can be learned about the features of a branch with a weight that is zero throughout",
        where=", ".join(zeros.values()),
        hint=f"leave dense what computes nothing: {option('skip', next(iter(zeros)))}",
    )


def _learned(job: LearningJob, watch: Watch) -> Learned:
    """Learn; where the first step runs out of memory, once more with checkpoints, which keep the masks.

    Checkpoints that nobody left to `auto` stay as they are, as does a run of several processes.
    """
    task, done = job.task(watch.note), list[int]()

    def on_step(record: StepRecord) -> None:
        done.append(record.step)
        watch.on_step(record)

    try:
        return learn_masks(task, replace(watch, on_step=on_step))
    except Exception as error:
        if done or memory_shortage(error) is None or not _can_checkpoint(task, job.compute):
            raise
    # The frames of the error held the tensors of the step that failed until here.
    del task
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    watch.note("memory ran out in the first step: trying once more with checkpoints")
    again = replace(job, compute=replace(job.compute, checkpointing="on"))
    return learn_masks(again.task(watch.note), watch)


def _can_checkpoint(task: LearningTask, compute: ComputeSettings) -> bool:
    decoder = getattr(task.gated, "decoder", None)
    known = isinstance(decoder, TrainingDecoder) and not decoder.checkpointing
    return known and compute.checkpointing == "auto" and task.ranks.size == 1


def follow(job: LearningJob) -> None:
    """Compute together with the process that calls `learn_within` with the same job, until its run ends.

    Raises:
        RankLost: if another process died.
        BudgetError, DataError: as `learn`.
    """
    if job.settings.method == "learned":
        settings = settings_for(job.program, job.settings, lambda note: None)
        follow_run(replace(job, settings=settings).task())


def task_of(
    program: Program, gated: Gated, text: Batches, budget: Budget, settings: LearnSettings
) -> LearningTask:
    """Return the learning problem of a program, for one process on its own device.

    Args:
        gated: the program with gates, in the form that runs.
    """
    return LearningTask(
        gated=gated,
        sites=program.sites,
        shapes=program.shapes,
        text=text,
        budget=budget,
        settings=settings,
        device=program.device,
        count=count_of(budget, program),
    )


def _check_packing(program: Program, settings: LearnSettings) -> None:
    if settings.packing != "documents":
        return
    if program.separator is None:
        raise DispfxError(
            f"{option('packing', 'documents')} needs a program that keeps documents apart, "
            "but this one does not",
            hint="learn on the program that `dispfx.api.separate_documents` returns",
        )
    if settings.method != "learned":
        raise DispfxError(
            f"{option('packing', 'documents')} is for learning, and "
            f"{option('method', shown(settings.method))} scores features once",
            hint=f"leave out {option('packing')}",
        )


def _scored(job: LearningJob, watch: Watch) -> list[Tensor]:
    gated = gate(job.program)
    task = task_of(job.program, gated, job.text, job.budget, job.settings)
    problem = replace(task.problem(), scoring=watch.on_score)
    return select_by_score(problem, gated.graph, job.budget)


def batches_of(
    tokens: Tensor | np.ndarray, settings: LearnSettings, held_out: Tensor | None = None
) -> TokenBatches:
    """Cut tokens into batches; the last tenth is held out unless separate text is given."""
    if held_out is not None:
        return TokenBatches(tokens, settings.seq_len, settings.batch_size, settings.seed, held_out)
    return TokenBatches.split(
        tokens, seq_len=settings.seq_len, batch_size=settings.batch_size, seed=settings.seed
    )
