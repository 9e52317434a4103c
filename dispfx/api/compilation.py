"""`compile`: from a decoder and a text to a verified folder, and `apply`: the same from a plan.

    open → capture → learn → lower → verify → write → read back → measure → report → rename

Nothing appears under the output's name before everything in it was verified.  What took long is kept
beside it: the state of learning and then the plan lie in DIR.state until DIR is complete.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from dispfx.api.fitting import fitted_settings
from dispfx.api.opening import Opening, context_of, learn_settings
from dispfx.api.ordinary import require_ordinary
from dispfx.api.preflight import require_room_for_weights, require_room_to_learn
from dispfx.api.programs import analyse, apart, follow, learn, only_planned, require_same_decoder
from dispfx.api.stages import Stages
from dispfx.api.text import Text, TextChoice, open_text, require_tokens, separator_of
from dispfx.api.training import device_of_learning
from dispfx.api.writing import Task, check_export, require_decoder_for, write_output
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import OutputError, VerificationError
from dispfx.ir.costs import CostTable, read_costs
from dispfx.ir.lookups import require_readable
from dispfx.ir.plan import Budget, BudgetOf, Plan
from dispfx.ir.program import Program
from dispfx.ir.sites import Select
from dispfx.learning.settings import LearnSettings
from dispfx.learning.state import saved_step
from dispfx.learning.text import Batches
from dispfx.preconditions import check_ratio, check_select
from dispfx.ranks import ALONE, Ranks
from dispfx.report import NullObserver, Observer, Report, Settings, load_report
from dispfx.source import Source
from dispfx.source.text import Words
from dispfx.text_origin import TEXT_BYTES, TEXT_FIELD, Reading
from dispfx.training.preparation import Compute

ALIGNMENT = {"cuda": 16, "cpu": 8}


def compile(
    model: str | nn.Module,
    ratio: float,
    *,
    out: str | Path,
    data: Words | Tensor | None = None,
    eval_data: Words | None = None,
    data_weights: Sequence[float] | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    eval_windows: int | None = None,
    tokenizer: str | None = None,
    ratio_of: BudgetOf = "blocks",
    settings: LearnSettings | None = None,
    compute: Compute | None = None,
    ranks: Ranks | None = None,
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
    export: str | None = None,
    print_after: Sequence[str] = (),
    observer: Observer | None = None,
    command: str | None = None,
) -> Report:
    """Make a decoder smaller by `ratio` and write a verified folder.

    Args:
        model: MODEL (see `dispfx.origin`), or a module.
        ratio: share of the counted parameters to remove, in (0, 1).
        out: folder to write; it must not exist.
        data: texts to learn from (see `dispfx.text_origin`), or token ids, (N,) integers; the demo brings its
            own.
        eval_data: texts to measure on; the last tenth of `data` by default, which is not learned from.
        data_weights: share of the sequences from each text of `data`, in order; joined without them.
        data_field: of JSON lines, parquet and data sets, that holds the text.
        data_bytes: of text that are read at most; of longer ones, evenly spaced pieces.
        settings: of learning; those of the `informed` recipe by default, with sizes of its own for `demo`.
        compute: how the decoder is run while masks are learned; chosen by the device by default.
        ranks: the processes of the run, of which this one leads; the others call `follow_command`.
        align: widths become multiples of this; 16 for a GPU target and 8 for a CPU by default.
        costs: table of times on the target device (tools/measure_costs.py); branches that would be slower
            are left dense.
        select: `after-norm`; or `before-norm`, one selection for the whole residual stream, for constrained
            settings.
        resume: go on from DIR.state; with a complete folder, do nothing.
        export: none, onnx, pt2 or dense; onnx for the demo and none otherwise by default.  With one
            selection for the whole stream, dense is a smaller decoder that needs no dispfx.

    Raises:
        DispfxError: for everything in the input that cannot be used.
        VerificationError: if two forms of the pruned decoder disagree; no folder is written then.
    """
    path = Path(out).expanduser()
    watcher = observer or NullObserver()
    check_ratio(ratio)
    check_export(export)
    if resume and (path / "report.json").is_file():
        watcher.note(f"{path} is complete; there is nothing to do")
        remove_state(state_folder(path, resume))
        return load_report(path / "report.json")
    refuse_existing(path)
    stages = Stages(watcher)
    opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
    how = Learning(
        ratio,
        ratio_of,
        settings,
        align,
        tuple(skip),
        target,
        resume,
        tuple(print_after),
        compute,
        costs,
        ranks,
        export,
        select,
    )
    chosen = TextChoice(data, eval_data, data_weights, Reading(data_field, data_bytes))
    # The pruned weights stand beside the dense ones while the folder is written.
    learned = learn_from(opening, chosen, how, state_folder(path, resume), stages, copies=2.0 - ratio)
    return _finish(
        Task(
            path,
            learned.state,
            learned.source,
            learned.program,
            learned.plan,
            learned.text,
            export=export,
            eval_windows=eval_windows,
            command=command,
            context=learned.settings.seq_len,
            settings=Settings(learned.settings, learned.plan.budget.align, select, data_bytes),
        ),
        stages,
    )


def apply(
    model: str | nn.Module,
    plan: str | Path | Plan,
    *,
    out: str | Path,
    data: Words | Tensor | None = None,
    eval_data: Words | None = None,
    data_weights: Sequence[float] | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    eval_windows: int | None = None,
    tokenizer: str | None = None,
    target: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    export: str | None = None,
    print_after: Sequence[str] = (),
    observer: Observer | None = None,
    command: str | None = None,
) -> Report:
    """Remove what a plan says from the decoder it was learned on, and write a verified folder.

    Args:
        plan: a plan, or its file.
        data: texts or token ids, (N,) integers, whose last tenth is measured on, unless `eval_data` is given.
        model, out, and others: as for `compile`.

    Raises:
        PlanMismatchError: if the plan belongs to another decoder.
        DispfxError, VerificationError: as `compile`.
    """
    check_export(export)
    path = refuse_existing(Path(out).expanduser())
    read = plan if isinstance(plan, Plan) else Plan.load(plan)
    stages = Stages(observer or NullObserver())
    chosen = TextChoice(data, eval_data, data_weights, Reading(data_field, data_bytes))
    with stages("open"):
        chosen.check()
        opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
        require_room_for_weights(opening, copies=1.0 + read.budget.keep)
        source = opening.open()
        require_decoder_for(export, source)
        text = open_text(source, chosen)
    text.require_measurable()
    program = only_planned(_analyse(source, stages, (), read.select, print_after), read)
    require_same_decoder(program, read)
    read = read.fitted(program.sites)
    require_tokens(source, text, program.vocabulary_size)
    return _finish(
        Task(
            path,
            None,
            source,
            program,
            read,
            text,
            export=export,
            eval_windows=eval_windows,
            command=command,
        ),
        stages,
    )


@dataclass(frozen=True)
class Learning:
    """How a plan is learned; the fields are those of `compile`."""

    ratio: float
    ratio_of: BudgetOf = "blocks"
    settings: LearnSettings | None = None
    align: int | None = None
    skip: tuple[str, ...] = ()
    target: str | None = None
    resume: bool = False
    print_after: tuple[str, ...] = ()
    compute: Compute | None = None
    costs: str | Path | None = None
    ranks: Ranks | None = None
    export: str | None = None
    select: Select = "after-norm"

    def alignment(self, program: Program) -> int:
        """Return what widths become multiples of."""
        return self.align or ALIGNMENT[self.target or device_of_learning(program, self.compute).type]


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
    **of_the_leader: object,
) -> None:
    """Take part in the learning of a process that calls `compile` or `learn_plan` with the same arguments.

    Args:
        ranks: the processes of the run, of which another one leads.
        data: texts or token ids, (N,) integers.
        of_the_leader: arguments that matter to the leading process alone.

    Raises:
        RankLost: if another process ended.
        DispfxError: for everything in the input that cannot be used.
    """
    path = Path(out).expanduser()
    if resume and ((path / "report.json").is_file() or path.is_file()):
        return
    opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
    chosen = TextChoice(data, eval_data, data_weights, Reading(data_field, data_bytes))
    how = Learning(
        ratio,
        ratio_of,
        settings,
        align,
        tuple(skip),
        target,
        resume,
        (),
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


@dataclass(frozen=True, eq=False)
class Ready:
    """What learning starts from; it may need another capture of the decoder than the rest."""

    source: Source
    text: Text
    batches: Batches
    program: Program
    learned_on: Program
    settings: LearnSettings
    costs: CostTable | None


def ready_to_learn(
    opening: Opening, chosen: TextChoice, how: Learning, stages: Stages, *, copies: float = 1.0
) -> Ready:
    """Open decoder and text and analyse the decoder; nothing is written.

    Args:
        copies: as for `learn_from`.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    chosen_settings = how.settings or learn_settings(opening.model)
    check_select(how.select, constrained=chosen_settings.constrained, costs=how.costs is not None)
    costs = None if how.costs is None else read_costs(how.costs)
    with stages("open"):
        chosen.check()
        require_room_for_weights(opening, copies=copies)
        source = opening.open()
        require_decoder_for(how.export, source)
        fitted = partial(
            fitted_settings, chosen_settings, context=context_of(source), ranks=(how.ranks or ALONE).size
        )
        settings = fitted()
        separator = separator_of(source) if settings.packing == "documents" else None
        text = open_text(source, chosen if separator is None else chosen.of_documents(source))
    if source.config is not None or "seq_len" not in settings.adaptable:
        text.batches(settings)  # Otherwise the decoder's graph says how long its sequences may be.
    text.require_measurable()
    program = _analyse(source, stages, how.skip, how.select, how.print_after)
    if how.select == "before-norm" and how.export == "dense":
        with stages("verify"):
            require_ordinary(source, program, how.ratio, how.ratio_of, how.alignment(program))
    require_tokens(source, text, program.vocabulary_size)
    learned_on = program
    if separator is not None:
        with stages("capture documents"):
            learned_on = apart(source.model, program, separator, skip=how.skip, select=how.select)
    settings = fitted(program=learned_on, note=stages.observer.note)
    require_readable(program, settings.seq_len)
    batches = text.batches(settings)
    require_room_to_learn(learned_on, settings, how.compute, how.ranks)
    return Ready(source, text, batches, program, learned_on, settings, costs)


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


def resumption(state: Path) -> str:
    step = saved_step(state)
    return f"no state in {state}: starting at step 0" if step is None else f"going on at step {step}"


def _analyse(
    source: Source, stages: Stages, skip: Sequence[str], select: Select, print_after: Sequence[str]
) -> Program:
    show = stages.observer.printed
    with stages("capture"):
        program = analyse(source.model, skip=skip, select=select, print_after=print_after, show=show)
    stages.observer.found(program)
    return program


def _finish(task: Task, stages: Stages) -> Report:
    """Write the folder; keep the plan where that fails, and remove the state where it does not."""
    try:
        report = write_output(task, stages)
    except VerificationError as error:
        if task.state is not None:
            plan = task.state / PLAN_FILE
            error.hint = f"the plan is kept: dispfx apply {task.source.name} {plan} --out {task.path}"
        raise
    if task.state is not None:
        remove_state(task.state)
    stages.observer.finished(report)
    return report


def remove_state(state: Path) -> None:
    """Remove DIR.state once what it was for is complete."""
    shutil.rmtree(state, ignore_errors=True)


def state_folder(path: Path, resume: bool) -> Path:
    """Return DIR.state, after refusing to overwrite an unfinished run.

    Raises:
        OutputError: if DIR.state exists and is not to be resumed.
    """
    state = path.with_name(f"{path.name}.state")
    if state.exists() and not resume:
        raise OutputError(
            "an unfinished run left its state",
            where=str(state),
            hint="go on with --resume, or remove that folder to start anew",
        )
    return state
