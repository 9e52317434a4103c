"""Learn which features every site keeps, under a budget (arXiv 2410.11988).

`learn` is the entry point: it sets the problem up, checks that every gate acts, runs steps while
saving a state that a killed run resumes from, and hardens the final logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from dispfx.distributed.ranks import ALONE, RankLost, Ranks
from dispfx.errors import DataError, DispfxError, memory_shortage
from dispfx.files.disk import cannot_write
from dispfx.ir.sites import Site
from dispfx.learning.follower import Start, follow, held_out_loss, measures, send_start, send_stop
from dispfx.learning.interrupt import ending_as_interrupt, uninterrupted
from dispfx.learning.learner import Gated, Learner, Problem, StepOutcome, check_gates, check_samples
from dispfx.learning.records import MetricsLog, Pace, StepRecord
from dispfx.learning.scores import logits_of_plan, starting_logits
from dispfx.learning.state import Identity, Position, load_state, save_state, settings_identity
from dispfx.learning.text import Batches
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import Groups, ParameterCount, check_reachable, hard_masks, harden
from dispfx.plan.knots import Knots
from dispfx.settings.learning_settings import LearnSettings
from dispfx.words.option_names import option


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of a run.

    Args:
        kept: sorted int32 indices that every site keeps, on the CPU; of a range, at its largest ratio.
        achieved: share of the counted parameters that was removed.
        logits: of every knot, flat over all sites in order, (K, N) float32 on the CPU.
        records: of this process, oldest first.
        first_step: where this process started; 0 without a state to resume.
        steps: steps done in all processes of the run.
        bad_steps: steps without a finite loss and gradient.
        seconds: duration of this process, with hardening.
    """

    kept: list[Tensor]
    achieved: float
    logits: Tensor
    records: tuple[StepRecord, ...]
    first_step: int
    steps: int
    bad_steps: int
    seconds: float


@dataclass(frozen=True, eq=False, kw_only=True)
class LearningTask:
    """The task of a run: decoder, sites, text, settings and processes.

    Args:
        gated: (ids_BT int64, one 1-D float mask per site) -> logits_BTV, with frozen weights.
        sites: in the order of the masks.
        shapes: of every parameter by path; tied ones once.
        text: batches to learn from, with the sizes in `settings`.
        budget: of the plan; of a range, that of its largest ratio.
        settings: of the run.
        device: of the decoder.
        ranks: the processes of the run.
        fingerprint: of the decoder; a state of another decoder is rejected.
        start_from: kept indices of the plan that learning starts from.
        dtype: of the decoder, where known; a state of another type is rejected.
        count: of what the budget counts; by default the parameters that its ratio counts.
        knots: the range of ratios, or None for that of the budget alone.
    """

    gated: Gated
    sites: Sequence[Site]
    shapes: Mapping[str, tuple[int, ...]]
    text: Batches
    budget: Budget
    settings: LearnSettings
    device: torch.device | str = "cpu"
    ranks: Ranks = ALONE
    fingerprint: str | None = None
    start_from: Sequence[Tensor] | None = None
    dtype: torch.dtype | None = None
    count: ParameterCount | None = None
    knots: Knots | None = None

    def problem(self) -> Problem:
        """Return the constants of learning, on the device.

        Raises:
            DataError: if the batches do not have the sizes in the settings.
            DispfxError: if the ranks cannot share a batch.
            BudgetError: if the sites cannot meet the budget.
        """
        text, settings, device = self.text, self.settings, torch.device(self.device)
        if (text.seq_len, text.batch_size) != (settings.seq_len, settings.batch_size):
            raise DataError(
                f"the text is cut into batches of {text.batch_size} × {text.seq_len} tokens, and the "
                f"settings ask for {settings.batch_size} × {settings.seq_len}"
            )
        self.ranks.check(settings.batch_size, settings.samples)
        count = self.count or ParameterCount.of_sites(self.sites, self.shapes, self.budget.of)
        groups = Groups.of_run(self.sites, constrained=settings.constrained)
        knots = self.knots or Knots((self.budget.ratio,))
        for ratio in {knots.ratios[0], knots.ratios[-1]}:
            check_reachable(self.sites, count, replace(self.budget, ratio=ratio), groups=groups)
        return Problem(
            gated=self.gated,
            sites=tuple(self.sites),
            groups=groups.to(device),
            count=count.to(device),
            knots=knots,
            text=text,
            settings=settings,
            device=device,
            ranks=self.ranks,
            cache_target=None if count.cache is None else self.budget.cache_left(count.cache.dense),
            floor=self.budget.floor,
        )


@dataclass(frozen=True, eq=False)
class Watch:
    """Where the state of a run is kept, and callbacks for progress.

    Args:
        state_dir: folder of the state and metrics.jsonl; without it nothing is written.
        resume: continue from the state in `state_dir`, if it exists.
        on_step: called with the record of every `log_every`-th step and of the last.
        note: called with notes on how the decoder is run.
        on_score: called with the number of scored sequences, and of all that are scored.
    """

    state_dir: Path | None = None
    resume: bool = False
    on_step: Callable[[StepRecord], None] = lambda record: None
    note: Callable[[str], None] = lambda text: None
    on_score: Callable[[int, int], None] = lambda done, total: None


def learn(task: LearningTask, watch: Watch | None = None) -> Learned:
    """Learn masks and return the selections that meet the budget.

    Args:
        task: of the run; this process leads its ranks, and all other ranks call `follow_run`.

    Raises:
        BudgetError: if the sites cannot meet the budget; before learning if possible.
        PassError: if a gate does not act.
        DataError, PlanMismatchError: if the state to resume from belongs to another run.
        DispfxError: if the loss stays non-finite, or the logits become non-finite.
        KeyboardInterrupt, RankLost: after the state was saved.
    """
    began, watch = perf_counter(), watch or Watch()
    problem = replace(task.problem(), scoring=watch.on_score)
    identity = _identity(problem, task)
    state_dir = watch.state_dir
    if state_dir is not None:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(state_dir, str(error.strerror)) from error
    start_N = None if task.start_from is None else logits_of_plan(problem, task.start_from)
    learner = _learner(problem, state_dir if watch.resume else None, identity, start_N, watch.note)
    first_step = learner.position.step
    records = _run(learner, task.budget, state_dir, identity, watch.on_step)
    logits_KN = learner.logits()
    kept = _hardened(learner, logits_KN, task.budget)
    left = problem.count.to("cpu").count_kept(hard_masks(task.sites, kept))
    return Learned(
        kept=kept,
        achieved=1.0 - left / problem.count.dense,
        logits=problem.groups.expand(logits_KN).float().cpu(),
        records=records,
        first_step=first_step,
        steps=learner.position.step,
        bad_steps=learner.position.bad_steps,
        seconds=perf_counter() - began,
    )


def follow_run(task: LearningTask) -> None:
    """Follow the rank that calls `learn` with the same task, until its run ends.

    Raises:
        BudgetError, PassError, DataError: as `learn`.
        RankLost: if another rank died.
    """
    follow(task.problem())


def _identity(problem: Problem, task: LearningTask) -> Identity:
    settings, knots = settings_identity(problem.settings), task.knots
    if task.start_from is not None:
        kept = torch.cat([indices.to("cpu", torch.int32) for indices in task.start_from])
        settings["start"] = f"plan ({sha256(kept.numpy().tobytes()).hexdigest()[:16]})"
    return {
        "decoder": task.fingerprint,
        "sites": [[site.name, site.size] for site in problem.sites],
        "budget": task.budget.recorded.plain | ({} if knots is None else {"ratio": knots.range_text}),
        "settings": settings,
        "text": problem.text.digest,
        "device": problem.device.type,
        "dtype": None if task.dtype is None else str(task.dtype).removeprefix("torch."),
    }


def _learner(
    problem: Problem,
    state_dir: Path | None,
    identity: Identity,
    start_N: Tensor | None,
    note: Callable[[str], None],
) -> Learner:
    """Return a learner at its start, or restored from the state in `state_dir`."""
    try:
        resumed = None if state_dir is None else _resumed(problem, state_dir, identity, start_N, note)
    except DispfxError:
        send_start(problem, None)
        raise
    step = 0 if resumed is None else resumed.position.step
    send_start(problem, Start(step, resumed is None))
    if resumed is None or step < problem.settings.steps:
        check_gates(problem)
        check_samples(problem)
    if resumed is not None:
        return resumed
    if problem.settings.start == "sensitivity":
        start_N = starting_logits(problem)
    return Learner(problem, start_N, note)


def _resumed(
    problem: Problem,
    state_dir: Path,
    identity: Identity,
    start_N: Tensor | None,
    note: Callable[[str], None],
) -> Learner | None:
    found = load_state(state_dir, identity)
    if found is None:
        return None
    # The initial logits are part of the state: the data that they were measured on may be gone.
    if problem.settings.start == "sensitivity":
        start_N = torch.zeros(problem.groups.features, device=problem.device)
    learner = Learner(problem, start_N, note)
    _restore(learner, *found, where=str(state_dir))
    return learner


def _restore(learner: Learner, position: Position, tensors: dict[str, Tensor], *, where: str) -> None:
    steps = learner.problem.settings.steps
    if position.step > steps:
        raise DataError(
            f"the state to resume from is at step {position.step}, but only {steps} steps were requested",
            where=where,
            hint=f"ask for at least as many steps, or start again without {option('resume')}",
        )
    try:
        learner.restore(position, tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the state to resume from is damaged: {error}",
            where=where,
            hint=f"start again without {option('resume')}",
        ) from error


def _run(
    learner: Learner,
    budget: Budget,
    state_dir: Path | None,
    identity: Identity,
    on_step: Callable[[StepRecord], None],
) -> tuple[StepRecord, ...]:
    settings = learner.problem.settings
    pace = Pace(settings.batch_size * settings.seq_len * settings.accumulate)
    first_step = learner.position.step
    records, measured = [], first_step

    def save() -> None:
        # A second termination signal, as for a lost rank, must not interrupt saving the state.
        with uninterrupted():
            if state_dir is not None:
                save_state(state_dir, identity, learner.position, learner.tensors())

    with ending_as_interrupt(), MetricsLog(state_dir, learner.position.step) as metrics:
        try:
            while learner.position.step < settings.steps:
                outcome = learner.advance()
                record = _record(learner, outcome, pace, budget)
                measured = record.step
                last = record.step == settings.steps
                if last or record.step % settings.save_every == 0:
                    save()
                if last or record.step % settings.log_every == 0:
                    records.append(record)
                    metrics.append(record)
                    on_step(record)
        except (KeyboardInterrupt, RankLost):
            save()
            raise
        except DispfxError:  # between two steps, where the other ranks wait for masks
            send_stop(learner.problem, learner.position.step, measured=measured)
            raise
        except Exception as error:
            if memory_shortage(error) is not None and learner.position.step > first_step:
                save()
            raise
    return tuple(records)


def _record(learner: Learner, outcome: StepOutcome, pace: Pace, budget: Budget) -> StepRecord:
    step, settings = learner.position.step, learner.problem.settings
    tokens_per_second, seconds_left = pace.tick(settings.steps - step)
    measure = measures(learner.problem, step)
    return StepRecord(
        step=step,
        steps=settings.steps,
        loss=outcome.loss,
        budget_loss=outcome.budget_loss,
        achieved_ratio=outcome.achieved_ratio,
        tokens_per_second=tokens_per_second,
        seconds_left=seconds_left,
        bad_steps=learner.position.bad_steps,
        held_out_loss=_held_out_loss(learner, budget) if measure else None,
    )


def _held_out_loss(learner: Learner, budget: Budget) -> float | None:
    """Return the held-out loss of the plan for these logits."""
    problem = learner.problem
    kept = _hardened(learner, learner.logits(), budget)
    return held_out_loss(problem, hard_masks(problem.sites, kept, device=problem.device))


def _hardened(learner: Learner, logits_KN: Tensor, budget: Budget) -> list[Tensor]:
    """Return the kept indices of every site for the logits; of a range, at its largest ratio.

    Raises:
        DispfxError: if they are not finite.
    """
    problem = learner.problem
    if not bool(logits_KN.isfinite().all()):
        raise DispfxError(
            f"the logits are not finite after step {learner.position.step}, so no plan can be made",
            hint=f"start again with a smaller {option('lr')}",
        )
    return harden(logits_KN[-1], problem.sites, problem.count, budget, groups=problem.groups)
