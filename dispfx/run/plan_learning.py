"""Learn a plan from a decoder and a text, with one process or a leader and its followers.

DIR.state next to the output holds the state of learning, and then the plan, until the output is complete.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DataError, OutputError
from dispfx.files.disk import cannot_write
from dispfx.learning.records import METRICS_FILE
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.learning.tensorboard import FOLDER as TENSORBOARD_FOLDER
from dispfx.learning.trainer import Watch
from dispfx.plan.family import Family
from dispfx.plan.hardening import LIMIT
from dispfx.plan.plan import Plan
from dispfx.report import Observer
from dispfx.run.made_from import made_by
from dispfx.run.mask_learning import LearningJob, follow, learn_family_within, learn_within
from dispfx.run.readiness import Ready, ready_to_learn
from dispfx.run.timed_stages import Stages
from dispfx.settings import RunSettings
from dispfx.settings.sections import state_place
from dispfx.words.option_names import option
from dispfx.words.own_function import shown

T = TypeVar("T")

# A folder without recovery, and the state of recovery, where that was asked for.
DRAFT, RECOVERY = "pruned", "recovery"
_OF_A_STATE = (STATE_FILE, PLAN_FILE, METRICS_FILE, TENSORBOARD_FOLDER, DRAFT, RECOVERY)


def learn_from(
    settings: RunSettings, stages: Stages, *, ranks: Ranks = ALONE, copies: float = 1.0
) -> tuple[Ready, Plan]:
    """Open a decoder and a text, learn a plan, and keep it in the run's state; return both.

    Args:
        ranks: the processes of the run, led by this one; all other processes call `follow_command`.
        copies: minimum memory of the run, as a multiple of the weights.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    state = state_folder(settings.output.path, settings.output.resume)
    _require_own_method(state, settings.learning.method)
    ready = ready_to_learn(settings, stages, ranks=ranks, copies=copies)
    plan = _learned(learn_within, settings, stages, ready, ranks)
    plan = replace(plan, bos=ready.text.bos, made_from=made_by(settings, ready))
    if plan.emptied:
        stages.observer.note(_at_minimum(plan))
    if all(one.full for one in plan.selections):
        stages.observer.note(
            f"nothing is removed: {plan.budget.ratio:g} of the counted parameters is less than a step of the "
            "widths"
        )
    else:
        say_missed(plan, stages.observer)
    # Scoring leaves no state, but the plan has to be kept somewhere while the folder is written.
    state.mkdir(parents=True, exist_ok=True)
    plan.save(state / PLAN_FILE)
    return ready, plan


def say_missed(plan: Plan, observer: Observer) -> None:
    """Note by how much a plan misses its ratio, if it does."""
    if abs(plan.achieved - plan.budget.ratio) > LIMIT:
        observer.note(
            f"{plan.achieved:.1%} are removed, not {plan.budget.ratio:.1%}: widths are multiples of "
            f"{plan.budget.align}, and a smaller {option('align')} comes closer"
        )


def family_from(settings: RunSettings, stages: Stages, *, ranks: Ranks = ALONE) -> Family:
    """As `learn_from`, for a range of ratios.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    ready = ready_to_learn(settings, stages, ranks=ranks)
    family = _learned(learn_family_within, settings, stages, ready, ranks)
    plan = replace(family.plan, bos=ready.text.bos, made_from=made_by(settings, ready))
    return replace(family, plan=plan)


def _learned(
    learn: Callable[[LearningJob, Watch], T],
    settings: RunSettings,
    stages: Stages,
    ready: Ready,
    ranks: Ranks,
) -> T:
    """Return what is learned, with the state of the run kept next to the output."""
    resume, observer = settings.output.resume, stages.observer
    state = state_folder(settings.output.path, resume)
    if resume:
        observer.note(resumption(state))

    def scored(done: int, total: int) -> None:
        observer.working("scoring", done, total, "sequences scored")

    with stages("learn"):
        watch = Watch(state, resume, observer.learning, observer.note, scored)
        return learn(ready.job(settings.compute, ranks), watch)


def _at_minimum(plan: Plan) -> str:
    """Say which sites keep the allowed minimum, and how many features that is."""
    names = set(plan.emptied)
    least = sorted({plan.minimum(one) for one in plan.selections if one.site in names})
    return (
        f"{len(plan.emptied)} of {len(plan.selections)} sites keep the allowed minimum, "
        f"{' or '.join(map(str, least))} of their features: {', '.join(plan.emptied[:3])}"
        + (" …" if len(plan.emptied) > 3 else "")
    )


def follow_command(settings: RunSettings, ranks: Ranks) -> Ready | None:
    """Follow a process that runs `compile` or `learn` with the same settings.

    Args:
        ranks: the processes of the run, led by another one.

    Returns:
        What was learned from; None where there was nothing to do.

    Raises:
        RankLost: if another process died.
        DispfxError: for everything in the input that cannot be used.
    """
    path = settings.output.path
    if settings.output.resume and ((path / "report.json").is_file() or path.is_file()):
        return None
    ready = ready_to_learn(settings, Stages(), ranks=ranks)
    follow(ready.job(settings.compute, ranks))
    return ready


def state_folder(path: Path, resume: bool) -> Path:
    """Return DIR.state, after checking that it overwrites neither an unfinished run nor other data.

    Raises:
        OutputError: if DIR.state holds files without --resume, or data that is not from a run.
    """
    if not path.name:
        raise OutputError(
            "the output needs a name", where=str(path), hint=f"name a folder with {option('out')}"
        )
    state = state_place(path)
    if os.path.lexists(state) and not _is_state(state):
        raise OutputError(
            "the run needs this path for its state, but it holds something else",
            where=str(state),
            hint=f"name another folder with {option('out')}",
        )
    if not resume and state.exists() and any(state.iterdir()):
        raise OutputError(
            "an unfinished run left its state",
            where=str(state),
            hint=f"go on with {option('resume')}, or remove that folder to start anew",
        )
    return state


@contextmanager
def held_state(path: Path, resume: bool) -> Iterator[Path]:
    """Yield DIR.state, held for one run while the block runs: the end of another run would remove it.

    The lock ends with the process, also if it is killed.  A state without files is removed afterwards.

    Raises:
        OutputError: if another run is at work there, or as `state_folder`.
    """
    state = state_folder(path, resume=True)
    above = [folder for folder in state.parents if not folder.exists()]
    descriptor = _locked(state)
    try:
        yield state_folder(path, resume)
    finally:
        with suppress(OSError):
            if _is_at(state, descriptor):
                state.rmdir()
            for folder in above:
                folder.rmdir()
        os.close(descriptor)


def _locked(state: Path) -> int:
    """Return a descriptor of the folder, made if it does not exist, that locks it until it is closed."""
    while True:
        try:
            state.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(state, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(state, str(error.strerror)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise OutputError(
                "another run is at work on this output, and keeps its state here",
                where=str(state),
                hint=f"wait until it ends, or name another output with {option('out')}",
            ) from error
        except OSError:
            return descriptor  # a file system without locks
        if _is_at(state, descriptor):
            return descriptor
        os.close(descriptor)  # the run that had it has ended since, and removed it


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether a path leads to the folder that is open under a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _require_own_method(state: Path, method: object) -> None:
    """Raise if features are to be scored where a run that learns left its state: scoring would remove it.

    Raises:
        DataError: with the step at which the state resumes.
    """
    step = None if method == "learned" else saved_step(state)
    if step is not None:
        scored = option("method", shown(method))
        raise DataError(
            f"the state is that of learning, at step {step}, and {scored} scores features once",
            where=str(state),
            hint=f"leave out {scored} to go on learning, or name another output with {option('out')}",
        )


def resumption(state: Path) -> str:
    """Return the message about the step at which a run resumes."""
    step = saved_step(state)
    return f"no state in {state}: starting at step 0" if step is None else f"going on at step {step}"


def remove_state(state: Path) -> None:
    """Remove DIR.state once the output is complete; other data under this name is left alone."""
    if _is_state(state):
        shutil.rmtree(state, ignore_errors=True)


def _is_state(folder: Path) -> bool:
    """Whether a folder holds only files of a run's state; half-written files begin with a dot."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(
        entry.name in _OF_A_STATE or entry.name.startswith((".", f"{DRAFT}.partial-"))
        for entry in folder.iterdir()
    )
