"""`compile`: from a decoder and a text to a verified folder, and `apply`: the same from a plan.

    open → capture → learn → lower → verify → write → read back → measure → report → rename

Nothing appears under the output's name before everything in it was verified.  What took long is kept
beside it: the state of learning and then the plan lie in DIR.state until DIR is complete.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from dispfx.api.length_checks import compare_longest, require_onnx_lengths, window_of
from dispfx.api.opening import Opening
from dispfx.api.plan_learning import learn_from, remove_state, state_folder
from dispfx.api.preflight import require_room_for_weights
from dispfx.api.programs import only_planned, require_same_decoder
from dispfx.api.readiness import Learning, analysed
from dispfx.api.stages import Stages
from dispfx.api.text import TextChoice, open_text, require_tokens
from dispfx.api.writing import Task, check_export, require_writable, write_output
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import VerificationError
from dispfx.ir.plan import BudgetOf, Plan
from dispfx.ir.sites import Select
from dispfx.learning.settings import LearnSettings
from dispfx.preconditions import check_ratio
from dispfx.ranks import Ranks
from dispfx.report import NullObserver, Observer, Report, Settings, load_report
from dispfx.source.text import Words
from dispfx.text_origin import TEXT_BYTES, TEXT_FIELD, Bos, Reading
from dispfx.training.preparation import Compute


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
    bos: Bos = "auto",
    allow_unknown: bool = False,
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
        bos: whether sequences begin with the beginning-of-sequence token: `auto` where the tokenizer puts one
            in front of a text, `on` or `off`.
        allow_unknown: read a text that is mostly unknown to the tokenizer, or no text at all.
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
        compute,
        costs,
        ranks,
        export,
        select,
    )
    reading = Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown)
    chosen = TextChoice(data, eval_data, data_weights, reading)
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
            settings=Settings(
                learned.settings, learned.plan.budget.align, select, data_bytes, bos, learned.text.bos
            ),
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
    bos: Bos = "auto",
    allow_unknown: bool = False,
    eval_windows: int | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    export: str | None = None,
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
    reading = Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown)
    chosen = TextChoice(data, eval_data, data_weights, reading)
    with stages("open"):
        chosen.check()
        opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
        require_room_for_weights(opening, copies=1.0 + read.budget.keep)
        source = opening.open()
        require_writable(export, source)
        text = open_text(source, chosen)
    stages.say(text.notes)
    text.require_measurable()
    program = only_planned(analysed(source, stages, (), read.select), read)
    require_same_decoder(program, read)
    read = read.fitted(program.sites)
    if export == "onnx":
        require_onnx_lengths(program.lengths, program.context)
    if text.measure is not None:
        with stages("check lengths"):
            compare_longest(source, program, window_of(source, program, None), stages.observer.note)
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
