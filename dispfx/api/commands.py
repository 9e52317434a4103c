"""The verbs that look at a decoder, make a plan, or use a folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dispfx.api.folders import is_output, open_folder
from dispfx.api.measuring import measure
from dispfx.api.onnx_folder import FOLDER, onnx_runner, write_onnx
from dispfx.api.opening import Opening, Runtime, context_of, longest_context
from dispfx.api.plan_learning import learn_from, remove_state, state_folder
from dispfx.api.programs import WriteSpelling, analyse
from dispfx.api.readiness import Learning
from dispfx.api.stages import Stages
from dispfx.api.text import TextChoice, require_known, vocabulary_of
from dispfx.api.verification import exported_lines
from dispfx.capturing import export_program, module_logits
from dispfx.choices import require_choice
from dispfx.deploy import exported
from dispfx.deploy.folder import refuse_existing
from dispfx.deploy.generate import generate as continue_ids
from dispfx.deploy.onnx.exporting import OPSET
from dispfx.deploy.onnx.legalize import Flavor
from dispfx.errors import DataError, VerificationError
from dispfx.finite_weights import require_finite_weights
from dispfx.ir.plan import BudgetOf, Plan
from dispfx.ir.program import Program
from dispfx.ir.sites import Select
from dispfx.learning.settings import LearnSettings
from dispfx.measure.agreement import Agreement, agreement
from dispfx.measure.equivalence import (
    random_token_ids,
    require,
)
from dispfx.measure.perplexity import Perplexity, TextFacts
from dispfx.preconditions import check_ratio
from dispfx.ranks import Ranks
from dispfx.report import NullObserver, Observer, load_report
from dispfx.source import config_alone, encode, load_config
from dispfx.source.text import ReadText, Words, bos_tokens, read_text, with_bos
from dispfx.text_origin import TEXT_BYTES, TEXT_FIELD, Bos, Reading
from dispfx.training.preparation import Compute


@dataclass(frozen=True, eq=False)
class _Ready:
    """A decoder to be used: dense from MODEL, or pruned from an output folder."""

    decoder: Callable[[Tensor], Any]
    tokenizer: Any | None
    config: Any | None
    context: int
    name: str
    vocabulary_size: int | None


def inspect(
    model: str | nn.Module,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    config_only: bool = False,
    skip: Sequence[str] = (),
    select: Select = "after-norm",
) -> Program:
    """Return what can be pruned in a decoder, and what is refused and why.

    Args:
        model: MODEL, a module, or a config.json.
        config_only: read no weight; so it is, too, where there are none beside the config.  The graph is
            then not compared with the decoder (`Program.measured`).

    Raises:
        SourceError: if a weight contains NaN or infinity.
        CaptureError, UnsupportedGraphError: if nothing can be.
    """
    if isinstance(model, str) and (config_only or config_alone(model)):
        source = load_config(model, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        source = Opening(model, revision, dtype, device, trust_remote_code).open()
        require_finite_weights(source.model)
    return analyse(source.model, skip=skip, select=select)


def learn_plan(
    model: str | nn.Module,
    ratio: float,
    *,
    out: str | Path,
    data: Words | Tensor | None = None,
    data_weights: Sequence[float] | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    bos: Bos = "auto",
    allow_unknown: bool = False,
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
    observer: Observer | None = None,
) -> Plan:
    """Learn a plan and write it to `out`; `apply` turns it into a folder.

    Args:
        data: texts or token ids, (N,) integers, of which the last tenth is held out.
        out: file to write; other arguments are those of `compile`.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    check_ratio(ratio)
    path = Path(out).expanduser()
    watcher = observer or NullObserver()
    if resume and path.is_file():
        watcher.note(f"{path} is complete; there is nothing to do")
        # A run that was killed between its last two steps left the state behind.
        remove_state(state_folder(path, resume))
        return Plan.load(path)
    refuse_existing(path)
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
        select=select,
    )
    reading = Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown)
    chosen = TextChoice(data, None, data_weights, reading)
    learned = learn_from(opening, chosen, how, state_folder(path, resume), Stages(watcher))
    learned.plan.save(path)
    remove_state(learned.state)
    return learned.plan


def evaluate(
    model: str | nn.Module,
    *,
    eval_data: Words | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    bos: Bos = "auto",
    allow_unknown: bool = False,
    windows: int | None = None,
    context: int | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    observer: Observer | None = None,
) -> Perplexity:
    """Measure the perplexity of a decoder, or of the one in an output folder, on a text.

    Raises:
        DataError: if there is no text, or it is shorter than two tokens.
    """
    chosen = _measured_text(eval_data, Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown))
    ready = _ready(Opening(model, revision, dtype, device, trust_remote_code, tokenizer))
    text, begins = _known_text(chosen, ready)
    Stages(observer or NullObserver()).say(text.notes)
    return measure(
        ready.decoder,
        text.tokens,
        context=context or ready.context,
        windows=windows,
        device=device or "cpu",
        text=TextFacts(text.name, None, begins, text.unknown_share),
    )


def _measured_text(eval_data: Words | None, reading: Reading) -> TextChoice:
    """Return a text to measure on, which can be read; to be asked before a decoder is opened."""
    if not eval_data:
        raise DataError("text to measure on is needed", hint="name a text file with --eval-data")
    chosen = TextChoice(eval_data=eval_data, reading=reading)
    chosen.check()
    return chosen


def _known_text(chosen: TextChoice, ready: _Ready) -> tuple[ReadText, tuple[int, ...]]:
    """Read a text with a decoder's tokenizer, and return it with the tokens that its windows begin with.

    Raises:
        DataError: if the decoder does not know one of the tokens.
    """
    assert chosen.eval_data is not None
    text = read_text(chosen.eval_data, ready.tokenizer, chosen.reading)
    begins = bos_tokens(chosen.reading.bos, ready.tokenizer, given_ids=text.given_ids)
    require_known(max(text.largest, *begins, 0), ready.vocabulary_size, ready.name)
    return text, begins


def agree(
    folder: str | Path,
    dense: str | nn.Module,
    *,
    eval_data: Words | None = None,
    data_field: str = TEXT_FIELD,
    data_bytes: int = TEXT_BYTES,
    bos: Bos = "auto",
    allow_unknown: bool = False,
    windows: int | None = None,
    context: int | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Agreement:
    """Compare what the decoder of an output folder predicts with what the dense one does, on a text.

    Args:
        dense: MODEL that the folder was compiled from; `revision` and `dtype` are its own.

    Raises:
        DataError: if there is no text, it is too short, or the decoders have other vocabularies.
    """
    chosen = _measured_text(eval_data, Reading(data_field, data_bytes, bos=bos, allow_unknown=allow_unknown))
    before = _ready(Opening(dense, revision, dtype, device, trust_remote_code, tokenizer))
    after = _ready(Opening(str(folder), None, None, device, trust_remote_code, tokenizer))
    text, begins = _known_text(chosen, before)
    return agreement(
        before.decoder,
        after.decoder,
        text.tokens,
        context=context or min(before.context, after.context),
        windows=windows,
        device=device or "cpu",
        bos=begins,
    )


def export(
    folder: str | Path,
    *,
    onnx: bool = False,
    pt2: bool = False,
    opset: int | None = None,
    write: WriteSpelling = "gather-add",
    ort_fusions: bool = False,
    padding: bool = True,
    trust_remote_code: bool = False,
    observer: Observer | None = None,
) -> list[Path]:
    """Write other forms of the decoder in a folder beside its checkpoint, verified.

    Args:
        opset, write: of the ONNX model, as for `dispfx.api.onnx_folder.write_onnx`.
        ort_fusions: use operators of ONNX Runtime's own; left out again where they do not verify.
        padding: whether the ONNX model's texts may be padded; without, it needs no mask.
        trust_remote_code: whether code that comes with the folder may run.
        observer: is told where the ONNX model has no KV cache, and why.

    Raises:
        OutputError: if the form is there already, or the folder holds a graph alone.
        VerificationError: if the new form disagrees; it is not written then.
    """
    path = Path(folder).expanduser()
    target, onnx_folder = path / exported.PROGRAM_FILE, path / FOLDER
    for asked, place in ((pt2, target), (onnx, onnx_folder)):
        if asked and is_output(path):
            refuse_existing(place)
    opened = open_folder(path, experts="batched", trust_remote_code=trust_remote_code)
    written: list[Path] = []
    if pt2:
        ids = random_token_ids(opened.vocabulary_size, (2, 8))
        exported.save_program(export_program(opened.graph_module, ids), opened.path)
        try:
            require(*exported_lines(opened.path, opened.decoder, opened.vocabulary_size))
        except VerificationError:
            target.unlink()
            raise
        written.append(target)
    if onnx:
        flavor = Flavor(padding, ort_fusions)
        model = write_onnx(opened, opset=opset or OPSET, write=write, flavor=flavor)
        if model.note is not None:
            (observer or NullObserver()).note(model.note)
        written.append(onnx_folder)
    return written


def generate(
    model: str | nn.Module,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    runtime: Runtime = "torch",
    bos: Bos = "auto",
    trust_remote_code: bool = False,
) -> str:
    """Return the prompt's continuation, without the prompt.

    Args:
        bos: whether the prompt begins with the beginning-of-sequence token, as for `compile`; a prompt that
            has it already gets no second.

    Raises:
        DispfxError: if there is no such runtime.
        DataError: if the prompt is empty or there is no tokenizer.
    """
    require_choice(get_args(Runtime), runtime, "--runtime")
    ready = _ready(Opening(model, trust_remote_code=trust_remote_code))
    if ready.tokenizer is None:
        raise DataError("text needs a tokenizer, and this decoder has none", where=ready.name)
    decoder = onnx_runner(Path(str(model))) if runtime == "onnx" else ready.decoder
    written = encode(prompt, ready.tokenizer).tolist()
    ids = torch.tensor([with_bos(written, bos_tokens(bos, ready.tokenizer))])
    with torch.no_grad():
        longer = continue_ids(
            decoder,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            eos=getattr(ready.config, "eos_token_id", None),
        )
    return ready.tokenizer.decode(longer[0, ids.shape[1] :], skip_special_tokens=True)


def _measured_context(folder: Path) -> int | None:
    """Return the windows in which a folder's perplexity was measured, or None where it was not."""
    path = folder / "report.json"
    change = load_report(path).perplexity if path.is_file() else None
    return None if change is None else change.protocol.context


def _ready(opening: Opening) -> _Ready:
    """Return a decoder that runs, from MODEL or from an output folder."""
    if isinstance(opening.model, str) and is_output(opening.model):
        opened = open_folder(
            opening.model, device=opening.device or "cpu", trust_remote_code=opening.trust_remote_code
        )
        config = opened.config
        # A module of one's own says nowhere how much it reads; the compile knew.
        told = None if config is not None else _measured_context(opened.path)
        context, known = told or longest_context(config), opened.vocabulary_size
        return _Ready(opened.decoder, opened.tokenizer, config, context, opening.model, known)
    source = opening.open()
    decoder = partial(module_logits, source.model)
    known = vocabulary_of(source.config)
    return _Ready(decoder, source.tokenizer, source.config, context_of(source), source.name, known)
