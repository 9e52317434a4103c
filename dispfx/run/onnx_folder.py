"""DIR/onnx: the ONNX model of an output folder, verified before it appears."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.analysis.label_map import Mismatch
from dispfx.compiler.pipelines import gathered
from dispfx.deploy.checkpoint import own_generation_config
from dispfx.deploy.folder import new_folder
from dispfx.deploy.genai import write_genai_config
from dispfx.deploy.onnx.exporting import cached_model, full_sequence_model
from dispfx.deploy.onnx.files import MODEL_FILE, save_model, takes_cache, takes_padding
from dispfx.deploy.onnx.legalize import Flavor
from dispfx.deploy.onnx.session import CachedSession, OnnxDecoder
from dispfx.deploy.section import ModelFiles
from dispfx.errors import (
    CaptureError,
    OutputError,
    UnsupportedGraphError,
    VerificationError,
    first_line,
    memory_shortage,
)
from dispfx.huggingface.widths_of_config import with_fewer_heads
from dispfx.ir.cached_inputs import CachedDecoder, bytes_per_token, cache_tensors
from dispfx.ir.lengths import held_to
from dispfx.ir.ops import source_line
from dispfx.ir.program import Program, main_dtype
from dispfx.run.folders import Opened, Written
from dispfx.run.length_checks import require_onnx_lengths
from dispfx.settings.verb_settings import FormSettings, WriteSpelling
from dispfx.source.own_code import carry_code
from dispfx.source.source import named_context
from dispfx.verification.equivalence import SHAPES_BT, Verification, random_token_ids, require
from dispfx.verification.onnx_model import Answers, Reference, onnx_lines, whole_answers, with_cached_answers
from dispfx.verification.tied_choices import tied_choice
from dispfx.words.option_names import option

FOLDER = "onnx"
_USUAL = FormSettings()


def write_onnx(
    opened: Opened,
    *,
    forms: FormSettings = _USUAL,
    plain: Callable[[], fx.GraphModule] | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES_BT,
) -> Written:
    """Write `onnx/` into an opened folder if ONNX Runtime agrees with the checkpoint.

    The model has a cache, unless the decoder cannot be captured with one.

    Args:
        opened: an output folder, which may still have its temporary name.
        forms: how the model is written; ONNX Runtime's own operators are left out if it does not verify with
            them.
        plain: returns the decoder without a cache, written by gather-add, for a folder that has no
            checkpoint to make it from.
        shapes: (batch, tokens) of the whole texts that are compared.

    Raises:
        VerificationError: if a comparison fails; nothing is written then.
        UnsupportedGraphError: if the exporter cannot translate the decoder.
    """
    flavor = Flavor(not forms.no_padding, forms.ort_fusions)
    if opened.plan is not None and opened.plan.lengths is not None:
        require_onnx_lengths(opened.plan.lengths, named_context(opened.config))
    answers = whole_answers(_reference(opened), shapes)
    opened.release()
    found = cached_twin(opened)
    cached, reason = (None, found.reason) if isinstance(found, Mismatch) else (found, None)
    if cached is not None:
        answers = with_cached_answers(answers, cached, padding=flavor.padding)

    def model(flavor: Flavor) -> Any:
        nonlocal cached
        if answers.cached is not None:
            # One decoder at a time: it is freed once its weights are on disk, and made again if needed.
            program, cached = cached or opened.cached(), None
            return cached_model(_spelled(program, forms.write), opset=forms.opset, flavor=flavor)
        lowered = (plain or opened.fast)()
        shape = (2, held_to(lowered).within(9))
        sample = random_token_ids(opened.known_tokens, shape, device=opened.device)
        return full_sequence_model(lowered, sample, opset=forms.opset)

    with new_folder(opened.path / FOLDER) as partial:
        of_cache = None if cached is None else bytes_per_token(cached.graph)
        if cached is not None:
            _write_configs(opened, cached, partial)
        elif opened.config is not None:
            _write_own_files(opened, partial, opened.config)
        try:
            return Written(_write_model(partial, model, flavor, answers), reason, of_cache)
        except VerificationError as error:
            if not flavor.ort_fusions:
                raise _with_cause(error, opened) from error
        try:
            lines = _write_model(partial, model, replace(flavor, ort_fusions=False), answers)
        except VerificationError as error:
            raise _with_cause(error, opened) from error
    return Written(lines, reason, of_cache)


def _with_cause(error: VerificationError, opened: Opened) -> VerificationError:
    """Return an error of an ONNX model that names a choice among equal scores, if the decoder makes one."""
    ids = random_token_ids(opened.known_tokens, SHAPES_BT[0], device=opened.device)
    if (choice := tied_choice(_graph_of(opened), ids)) is None:
        return error
    return VerificationError(
        f"{error.problem}; the decoder takes the largest of several equal scores, and torch and ONNX Runtime "
        "take different ones",
        where=source_line(choice) or str(choice),
        hint="it can only be exported if its scores differ, for example without a ReLU before the choice",
    )


def _write_model(
    folder: Path, model: Callable[[Flavor], Any], flavor: Flavor, answers: Answers
) -> list[Verification]:
    # The weights are on disk now; comparisons read them from there.
    save_model(model(flavor), folder / MODEL_FILE)
    # Graphs are reference cycles: without this their weights would stay while ONNX Runtime loads its own.
    gc.collect()
    lines = onnx_lines(folder / MODEL_FILE, answers)
    require(*lines)
    return lines


def cached_twin(opened: Opened) -> Program | Mismatch:
    """Return the folder's decoder as a program with a cache, or the reason why it has none."""
    if opened.config is None:
        return Mismatch("only decoders of transformers are captured with a cache")
    try:
        return opened.cached()
    except (CaptureError, UnsupportedGraphError) as error:
        if memory_shortage(error) is not None:
            raise
        return Mismatch(first_line(error))


def has_onnx(folder: Path) -> bool:
    """Whether an output folder holds an ONNX model."""
    return (folder / FOLDER / MODEL_FILE).is_file()


def folder_onnx_lines(opened: Opened, shapes: Sequence[tuple[int, int]] = SHAPES_BT) -> list[Verification]:
    """Compare the folder's ONNX model with its checkpoint, also on whole texts of these shapes.

    Raises:
        DataError: if the model is damaged.
    """
    path = opened.path / FOLDER / MODEL_FILE
    answers = whole_answers(_reference(opened), shapes)
    if takes_cache(path):
        answers = with_cached_answers(answers, opened.cached(), padding=takes_padding(path))
    return onnx_lines(path, answers)


def onnx_runner(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the folder's ONNX model as a decoder for texts that grow: ids (B, T) to logits (B, N, V) of
    the N tokens that are new since the last call.

    Raises:
        OutputError: if the folder has none.
    """
    if not has_onnx(folder):
        raise OutputError(
            "the folder has no ONNX model", where=str(folder), hint=f"dispfx export {folder} --onnx"
        )
    path = folder / FOLDER / MODEL_FILE
    if not takes_cache(path):
        return OnnxDecoder(path)
    return _Growing(CachedSession(path).decoder())


class _Growing:
    """Passes only new tokens to a decoder with a cache."""

    def __init__(self, decoder: CachedDecoder):
        self._decoder = decoder
        self._seen = 0

    def __call__(self, ids: Tensor) -> Tensor:
        new, self._seen = ids[:, self._seen :], ids.shape[1]
        return self._decoder(new)


def _spelled(program: Program, write: WriteSpelling) -> Program:
    """Return the program with its writes in the requested form.

    Raises:
        UnsupportedGraphError: for `index-add` in half precision, which ONNX Runtime does not support.
    """
    if write == "gather-add":
        return gathered(program)
    if program.dtype in (torch.float16, torch.bfloat16):
        raise UnsupportedGraphError(
            f"ONNX Runtime has no adding scatter for {str(program.dtype).removeprefix('torch.')}",
            hint=f"leave out {option('write', 'index-add')}",
        )
    return program


def _write_configs(opened: Opened, cached: Program, folder: Path) -> None:
    """Write the decoder's own config without the dispfx section, and genai_config.json.

    The fields that clients read (vocabulary, layers, heads, positions) also hold for the pruned decoder,
    unless its caches differ in heads or, by pruned values, in size: genai has one number of each for all, and
    gets no file then.  If all layers keep the same number of fewer heads, both files name that number.
    """
    caches = cache_tensors(cached.graph)
    heads = {cache.heads for cache in caches}
    config: Any = opened.config
    pruned = opened.plan is not None and bool(opened.plan.sites)
    if pruned and len(heads) == 1:
        config = with_fewer_heads(config, *heads)
    generation = _write_own_files(opened, folder, config)
    if pruned and len({(cache.heads, cache.size) for cache in caches}) > 1:
        return
    write_genai_config(
        folder,
        model_file=MODEL_FILE,
        caches=cache_tensors(cached.graph),
        inputs=cached.inputs,
        vocabulary_size=cached.vocabulary_size,
        config=config,
        generation_config=generation,
    )


def _write_own_files(opened: Opened, folder: Path, config: Any) -> Any:
    """Write a decoder's config and its own tokenizer, and return its generation config."""
    generation: Any = own_generation_config(opened.path)
    ModelFiles(config, None, generation, opened.tokenizer).write(folder)
    carry_code(folder, {"AutoConfig": config})
    return generation


def _graph_of(opened: Opened) -> fx.GraphModule:
    """Return the decoder as a graph without a cache."""
    decoder = opened.decoder
    return decoder if isinstance(decoder, fx.GraphModule) else opened.graph_module


def _reference(opened: Opened) -> Reference:
    decoder = opened.decoder
    own = {path: one for path, one in decoder.named_parameters()}
    # One product in bfloat16 is enough for ONNX Runtime's CPU provider to refuse a model.
    coarse = any(one.dtype == torch.bfloat16 for one in own.values())
    dtype = torch.bfloat16 if coarse else main_dtype(own)
    device = next(decoder.parameters()).device

    return Reference(decoder, lambda: _graph_of(opened), opened.known_tokens, dtype, device)
