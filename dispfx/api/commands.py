"""Verbs that inspect a decoder or use a folder."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits
from dispfx.capturing.unlifting import fingerprint
from dispfx.deploy import exported
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.folder import refuse_existing
from dispfx.deploy.generate import generate as continue_ids
from dispfx.errors import DataError, DispfxError, PlanMismatchError
from dispfx.files.disk import partial_beside, remove_abandoned
from dispfx.plan.plan import Plan
from dispfx.quality.agreement import Agreement, compare_on_text
from dispfx.quality.perplexity import Perplexity, TextFacts, measure
from dispfx.report import NullObserver, Observer, load_report
from dispfx.report.quantized import quantized_notes
from dispfx.run.folders import Opened, is_output, require_unchanged
from dispfx.run.onnx_folder import FOLDER, folder_onnx_lines, has_onnx, onnx_runner, write_onnx
from dispfx.run.opening import open_model, open_output, require_own_form
from dispfx.run.quantized_checkpoint import write_quantized_checkpoint
from dispfx.run.quantized_onnx import quantized_onnx_folder, write_quantized_onnx
from dispfx.run.quantized_record import is_unrecorded, record
from dispfx.run.run_text import TextChoice, require_known, require_one_tokenizer, vocabulary_of
from dispfx.run.timed_stages import Stages
from dispfx.settings import ModelSettings, TextSettings
from dispfx.settings.trees import EvalSettings, ExportSettings, GenerateSettings
from dispfx.settings.verb_settings import FormSettings
from dispfx.source import encode
from dispfx.source.source import beyond_context, context_of, longest_context, other_entry
from dispfx.source.text import ReadText, bos_tokens, read_text, with_bos
from dispfx.verification.equivalence import require
from dispfx.verification.graphs import exported_lines
from dispfx.words.chosen_device import chosen_device
from dispfx.words.option_names import option
from dispfx.words.preconditions import check_folder


@dataclass(frozen=True, eq=False)
class _Ready:
    """A decoder ready for use: dense from MODEL, or pruned from an output folder.

    Args:
        compiled_from: fingerprint of the dense decoder, of an output folder.
        module: of MODEL.
    """

    decoder: Callable[[Tensor], Any]
    tokenizer: Any | None
    config: Any | None
    context: int
    name: str
    vocabulary_size: int | None
    compiled_from: str | None = None
    module: nn.Module | None = None


def evaluate(model: Any, *, observer: Observer | None = None, **changes: Any) -> Perplexity:
    """Measure the perplexity of a decoder, or of the one in an output folder, on a text.

    Args:
        model: MODEL, an output folder, or `EvalSettings`.
        changes: single settings, as in `eval_data="text.txt", context=512`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DataError: if there is no text, or it is shorter than two tokens.
    """
    settings = EvalSettings.given(model, changes)
    chosen = _measured_text(settings.text)
    ready = _ready(settings.model, of_dense=settings.evaluation.dense is not None)
    text, begins = _known_text(chosen, ready)
    context = settings.evaluation.context or ready.context
    window = min(context, len(text.tokens) + len(begins))
    Stages(observer).say([*text.notes, *beyond_context(ready.config, window)])
    return measure(
        ready.decoder,
        text.tokens,
        context=context,
        windows=settings.text.eval_windows,
        device=settings.model.device or "cpu",
        text=TextFacts(text.name, None, begins, text.unknown_share),
    )


def _measured_text(settings: TextSettings) -> TextChoice:
    """Return the text to measure on after checking it; call this before opening a decoder."""
    if not settings.eval_data:
        raise DataError("text to measure on is needed", hint=f"name a text file with {option('eval_data')}")
    chosen = TextChoice(settings)
    chosen.check()
    return chosen


def _known_text(chosen: TextChoice, ready: _Ready) -> tuple[ReadText, tuple[int, ...]]:
    """Read a text with a decoder's tokenizer; return it with the tokens that its windows begin with.

    Raises:
        DataError: if the decoder does not know one of the tokens.
    """
    text = read_text(chosen.settings.eval_data, ready.tokenizer, chosen.reading)
    begins = bos_tokens(chosen.settings.bos, ready.tokenizer, given_ids=text.given_ids)
    require_known(max(text.largest, *begins, 0), ready.vocabulary_size, ready.name)
    return text, begins


def agree(folder: Any, **changes: Any) -> Agreement:
    """Compare the predictions of the decoder in an output folder with those of the dense one, on a text.

    Args:
        folder: an output folder, or `EvalSettings`.
        changes: single settings; `dense` is the MODEL that the folder was compiled from, and revision and
            dtype are its own.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DataError: if there is no text, it is too short, or vocabularies or tokenizers differ.
        PlanMismatchError: if the folder was compiled from a decoder with other weights or another config.
    """
    settings = EvalSettings.given(folder, changes)
    model = settings.model
    chosen = _measured_text(settings.text)
    before = _ready(replace(model, model=settings.evaluation.dense))
    after = _ready(replace(model, model=str(model.model), revision=None, dtype=None))
    require_one_tokenizer(after.tokenizer, before.tokenizer, ours_of=after.name, theirs_of=before.name)
    if not _is_dense_of(before, after):
        raise PlanMismatchError(
            f"{after.name} was compiled from a decoder with other weights",
            where=before.name,
            hint=f"name the decoder that it was compiled from with {option('dense')}",
        )
    if (entry := other_entry(after.config, before.config)) is not None:
        raise PlanMismatchError(
            f"the config of {after.name} has another {entry} than that of the dense decoder, which computes "
            "another function",
            where=before.name,
            hint=f"name the decoder that it was compiled from with {option('dense')}",
        )
    text, begins = _known_text(chosen, before)
    return compare_on_text(
        before.decoder,
        after.decoder,
        text.tokens,
        context=settings.evaluation.context or min(before.context, after.context),
        windows=settings.text.eval_windows,
        device=model.device or "cpu",
        text=TextFacts(text.name, None, begins, text.unknown_share),
    ).agreement


def _is_dense_of(dense: _Ready, pruned: _Ready) -> bool:
    """Whether a folder was compiled from weights like these, or does not say from which.

    In float16 a folder has rounded them before the fingerprint does.
    """
    wanted, module = pruned.compiled_from, dense.module
    if wanted is None or module is None:
        return wanted is None
    return any(fingerprint(module, stored=dtype) == wanted for dtype in (None, torch.float16))


def export(folder: Any, *, observer: Observer | None = None, **changes: Any) -> list[Path]:
    """Write other forms of the decoder in a folder, verified.

    Args:
        folder: an output folder, or `ExportSettings`.
        observer: notified if the ONNX model has no KV cache, with the reason; and of what quantization
            changes.
        changes: single settings, as in `onnx=True`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        OutputError: if the form exists already, the folder holds a graph alone, or its files have changed.
        VerificationError: if the new form disagrees; it is not written then.
    """
    settings = ExportSettings.given(folder, changes)
    forms, observer = settings.forms, observer or NullObserver()
    path = Path(settings.model.model).expanduser()
    check_folder(path)
    require_own_form(settings.model)
    device = chosen_device(settings.model.device)
    target = path / exported.PROGRAM_FILE
    if is_output(path):
        for place in _new_places(path, forms):
            refuse_existing(place)
    TextChoice(settings.text).check()
    opened = open_output(replace(settings.model, device=None), experts="batched")
    require_unchanged(opened.path)
    written: list[Path] = []
    if forms.pt2:
        _write_program(opened, target)
        written.append(target)
    if forms.onnx:
        written += _written_onnx(opened, forms, observer)
    if forms.quantize != "none":
        place = _quantized_place(path, forms)
        if is_unrecorded(place):
            observer.note(f"{place} is complete; an earlier run ended before the report had its figures")
            found = record(path, place)
        else:
            write = write_quantized_onnx if forms.onnx else write_quantized_checkpoint
            found = write(replace(opened, device=device), forms.quantize, settings.text)
        for line in quantized_notes(found):
            observer.note(line)
        written.append(place)
    return written


def _write_program(opened: Opened, target: Path) -> None:
    """Write `program.pt2`, which appears once it has been compared."""
    remove_abandoned(target)
    scratch = partial_beside(target)
    scratch.mkdir()
    try:
        exported.save_graph(opened.graph_module, scratch)
        require(*exported_lines(scratch, opened.decoder, opened.known_tokens))
        os.replace(scratch / target.name, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _new_places(path: Path, forms: FormSettings) -> list[Path]:
    """Return the paths that must not exist yet; an ONNX model that is there can be quantized as it is."""
    again = forms.quantize != "none" and forms.onnx and not forms.shapes_onnx and has_onnx(path)
    place = _quantized_place(path, forms)
    asked = (
        (forms.pt2, path / exported.PROGRAM_FILE),
        (forms.onnx and not again, path / FOLDER),
        (forms.quantize != "none" and not is_unrecorded(place), place),
    )
    return [new for wanted, new in asked if wanted]


def _quantized_place(path: Path, forms: FormSettings) -> Path:
    return path / (quantized_onnx_folder(forms.quantize) if forms.onnx else forms.quantize)


def _written_onnx(opened: Opened, forms: FormSettings, observer: Observer) -> list[Path]:
    """Write DIR/onnx, or compare the one that is there with the checkpoint; return what was written."""
    if has_onnx(opened.path):
        require(*folder_onnx_lines(opened))
        return []
    for note in write_onnx(opened, forms=forms).notes:
        observer.note(note)
    return [opened.path / FOLDER]


def generate(model: Any, prompt: str | None = None, **changes: Any) -> str:
    """Return the prompt's continuation, without the prompt.

    A prompt that already begins with the beginning-of-sequence token gets no second one.

    Args:
        model: MODEL, an output folder, or `GenerateSettings`.
        prompt: text to continue.
        changes: single settings, as in `max_new_tokens=32, top_k=20`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DataError: if the prompt is empty or has a token that the decoder does not know, or there is no
            tokenizer.
    """
    settings = GenerateSettings.given(model, changes | ({} if prompt is None else {"prompt": prompt}))
    asked = settings.generation
    ready = _ready(settings.model)
    if ready.tokenizer is None:
        raise DataError(
            "text needs a tokenizer, but this decoder has none",
            where=ready.name,
            hint=f"name one with {option('tokenizer')}",
        )
    decoder = onnx_runner(Path(str(settings.model.model))) if asked.runtime == "onnx" else ready.decoder
    written = encode(asked.prompt, ready.tokenizer).tolist()
    require_known(max(written), ready.vocabulary_size, ready.name)
    ids = torch.tensor([with_bos(written, bos_tokens(settings.text.bos, ready.tokenizer))])
    with torch.no_grad():
        longer = continue_ids(
            decoder,
            ids,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            seed=asked.seed,
            eos=getattr(ready.config, "eos_token_id", None),
        )
    return ready.tokenizer.decode(longer[0, ids.shape[1] :], skip_special_tokens=True)


def _measured_context(folder: Path) -> int | None:
    """Return the context in which a folder's perplexity was measured, or None if it was not."""
    path = folder / "report.json"
    change = load_report(path).perplexity if path.is_file() else None
    return None if change is None else change.protocol.context


def _ready(settings: ModelSettings, *, of_dense: bool = False) -> _Ready:
    """Return a decoder that runs, from MODEL or from an output folder (`of_dense` as in `open_output`)."""
    model = settings.model
    if isinstance(model, str) and is_output(model):
        opened = open_output(settings, of_dense=of_dense)
        config = opened.config
        # A user module does not declare its context; the compile recorded it.
        measured = None if config is not None else _measured_context(opened.path)
        context, known = measured or longest_context(config), opened.text_tokens
        plan = opened.path / PLAN_FILE
        dense = Plan.load(plan).fingerprint if plan.is_file() else None
        return _Ready(opened.decoder, opened.tokenizer, config, context, model, known, dense)
    source = open_model(settings)
    decoder = partial(module_logits, source.model)
    known = vocabulary_of(source.config) or _width_of_logits(source.model)
    return _Ready(
        decoder,
        source.tokenizer,
        source.config,
        context_of(source),
        source.name,
        known,
        module=source.model,
    )


def _width_of_logits(model: Any) -> int | None:
    """Return how many tokens a decoder predicts one of; None if it does not run on a single token."""
    first = next(iter((*model.parameters(), *model.buffers())), None)
    ids = torch.zeros((1, 1), dtype=torch.int64, device="cpu" if first is None else first.device)
    with torch.no_grad():
        try:
            return module_logits(model, ids).shape[-1]
        except DispfxError:
            return None
