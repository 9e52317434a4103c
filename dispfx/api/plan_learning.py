"""A plan is learned from a decoder and a text: by one process, or by one that leads and others that follow.

DIR.state beside the output holds the state of learning, and then the plan, until what it is for is complete.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from dispfx.api.opening import Opening
from dispfx.api.programs import follow, learn
from dispfx.api.readiness import Learning, ready_to_learn
from dispfx.api.stages import Stages
from dispfx.api.text import Text, TextChoice
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.errors import OutputError
from dispfx.ir.plan import Budget, BudgetOf, Plan
from dispfx.ir.program import Program
from dispfx.ir.sites import Select
from dispfx.learning.records import METRICS_FILE
from dispfx.learning.settings import LearnSettings
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.learning.tensorboard import FOLDER as TENSORBOARD_FOLDER
from dispfx.ranks import Ranks
from dispfx.report import NullObserver
from dispfx.source import Source
from dispfx.source.text import Words
from dispfx.text_origin import TEXT_BYTES, TEXT_FIELD, Bos, Reading
from dispfx.training.preparation import Compute

_OF_A_STATE = (STATE_FILE, PLAN_FILE, METRICS_FILE, TENSORBOARD_FOLDER)


@dataclass(frozen=True, eq=False)
class Learned:
    """A plan, and what it was learned from."""

    source: Source
    text: Text
    program: Program
    plan: Plan
    state: Path
    settings: LearnSettings


def learn_from(
    opening: Opening,
    chosen: TextChoice,
    how: Learning,
    state: Path,
    stages: Stages,
    *,
    copies: float = 1.0,
) -> Learned:
    """Open a decoder and a text, learn a plan, and keep it in `state`.

    Args:
        copies: how many times as large as the weights the run is at the least.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    ready = ready_to_learn(opening, chosen, how, stages, copies=copies)
    program, settings = ready.program, ready.settings
    if how.resume:
        stages.observer.note(resumption(state))
    with stages("learn"), _unless_it_fails_at_once(state):
        plan = learn(
            ready.learned_on,
            ready.batches,
            how.ratio,
            of=how.ratio_of,
            align=how.alignment(program),
            costs=ready.costs,
            settings=settings,
            compute=how.compute,
            ranks=how.ranks,
            note=stages.observer.note,
            state_dir=state,
            resume=how.resume,
            on_step=stages.observer.learning,
        )
        plan = replace(plan, bos=ready.text.bos)
    if plan.emptied:
        stages.observer.note(
            f"{len(plan.emptied)} of {len(plan.selections)} sites keep the least that a site may, "
            f"{plan.budget.align} of their features: {', '.join(plan.emptied[:3])}"
            + (" …" if len(plan.emptied) > 3 else "")
        )
    # Scores leave no state behind, and a plan has to lie somewhere while the folder is made.
    state.mkdir(parents=True, exist_ok=True)
    plan.save(state / PLAN_FILE)
    return Learned(ready.source, ready.text, program, plan, state, settings)


def follow_command(
    model: str | nn.Module,
    ratio: float,
    *,
    out: str | Path,
    ranks: Ranks,
    data: Words | Tensor | None = None,
    eval_data: Words | None = None,
    data_weights: Sequence[float] | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    bos: Bos = "auto",
    allow_unknown: bool = False,
    tokenizer: str | None = None,
    ratio_of: BudgetOf = "blocks",
    settings: LearnSettings | None = None,
    compute: Compute | None = None,
    align: int | None = None,
    costs: str | Path | None = None,
    skip: Sequence[str] = (),
    select: Select = "after-norm",
    target: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    resume: bool = False,
) -> None:
    """Take part in the learning of a process that calls `compile` or `learn_plan` with the same arguments.

    Arguments that only the leading process needs, such as `export`, are left out.

    Args:
        ranks: the processes of the run, of which another one leads.
        data: texts or token ids, (N,) integers.

    Raises:
        RankLost: if another process ended.
        DispfxError: for everything in the input that cannot be used.
    """
    path = Path(out).expanduser()
    if resume and ((path / "report.json").is_file() or path.is_file()):
        return
    opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
    reading = Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown)
    chosen = TextChoice(data, eval_data, data_weights, reading)
    how = Learning(
        ratio,
        ratio_of,
        settings,
        align,
        tuple(skip),
        target,
        resume,
        compute,
        costs,
        ranks,
        select=select,
    )
    follow_plan(opening, chosen, how)


def follow_plan(opening: Opening, chosen: TextChoice, how: Learning) -> None:
    """Compute with the process that calls `learn_from` with the same arguments; nothing is written.

    Raises:
        RankLost: if another process ended.
        DispfxError: for everything in the input that cannot be used.
    """
    assert how.ranks is not None
    ready = ready_to_learn(opening, chosen, how, Stages(NullObserver()))
    budget = Budget(how.ratio, how.ratio_of, how.alignment(ready.program), ready.costs)
    follow(ready.learned_on, ready.batches, budget, ready.settings, how.ranks, how.compute)


def state_folder(path: Path, resume: bool) -> Path:
    """Return DIR.state, after refusing to overwrite an unfinished run, or what is none.

    Raises:
        OutputError: if DIR.state exists and is not to be resumed, or holds what no run wrote.
    """
    state = path.with_name(f"{path.name}.state")
    if os.path.lexists(state) and not _is_state(state):
        raise OutputError(
            "the run keeps its state here until it is complete, and this is something else",
            where=str(state),
            hint="name another folder with --out",
        )
    if state.exists() and not resume:
        raise OutputError(
            "an unfinished run left its state",
            where=str(state),
            hint="go on with --resume, or remove that folder to start anew",
        )
    return state


def resumption(state: Path) -> str:
    """Return from which step a run goes on, as a user is told."""
    step = saved_step(state)
    return f"no state in {state}: starting at step 0" if step is None else f"going on at step {step}"


def remove_state(state: Path) -> None:
    """Remove DIR.state once what it was for is complete; something else of this name is left alone."""
    if _is_state(state):
        shutil.rmtree(state, ignore_errors=True)


def _is_state(folder: Path) -> bool:
    """Whether a folder holds nothing but what a run keeps there; half-written files begin with a dot."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(entry.name in _OF_A_STATE or entry.name.startswith(".") for entry in folder.iterdir())


@contextmanager
def _unless_it_fails_at_once(state: Path) -> Iterator[None]:
    """Leave no empty state behind, which would refuse the next run, where nothing was learned yet."""
    there = state.exists()
    try:
        yield
    except Exception:
        if not there:
            with suppress(OSError):
                state.rmdir()
        raise
