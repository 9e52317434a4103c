"""DIR/onnx-int4 and DIR/onnx-int8: the ONNX model of a folder with weights in fewer bits.

1. They are made from DIR/onnx, which was compared with the checkpoint.
2. The written model is checked against it, and then measured on a text next to it.
3. report.json, the card and the page get the figures, and `verify` knows the digests.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from torch import Tensor

from dispfx.deploy.digests import digests
from dispfx.deploy.folder import new_folder
from dispfx.deploy.onnx.files import MODEL_FILE, load_model, save_model, takes_cache
from dispfx.deploy.onnx.quantize import left_float, quantized
from dispfx.deploy.onnx.session import CachedSession, OnnxDecoder
from dispfx.files.disk import replacing
from dispfx.quality.agreement import compare_on_text
from dispfx.report import Protocol, Quantized, QuantizedQuality, Report, load_report, save_report
from dispfx.report.page import write_page
from dispfx.report.quantized import with_quantized_section
from dispfx.run.folders import Opened
from dispfx.run.onnx_folder import FOLDER
from dispfx.run.run_text import MeasuredText, TextChoice, texts_to_measure
from dispfx.settings import TextSettings
from dispfx.settings.verb_settings import Quantize
from dispfx.source import Source
from dispfx.source.source import longest_context, named_context
from dispfx.verification.equivalence import SHAPES_BT, Verification, require
from dispfx.verification.quantized_model import QuantizedModel, quantized_lines

# Both models give the logits of a whole window, which are large.
_CONTEXT = 512
_REPORT = "report.json"


def quantized_folder(scheme: str) -> str:
    """Return the name of the folder of a quantized model."""
    return f"{FOLDER}-{scheme}"


def write_quantized(opened: Opened, scheme: Quantize, text: TextSettings) -> Quantized:
    """Write `onnx-<scheme>/` from `onnx/`, checked and measured, and return what a report says of it.

    Args:
        opened: an output folder with an ONNX model.
        scheme: int4 or int8.
        text: to measure on; the demo's own text or the project's second text by default.

    Raises:
        VerificationError: if the written model has other weights, or computes something else; it does not
            appear then.
        DataError: if the text cannot be used.
    """
    chosen = _text_of(opened, text)
    original = opened.path / FOLDER / MODEL_FILE
    folder = opened.path / quantized_folder(scheme)
    with new_folder(folder) as partial:
        _copy_configs(original.parent, partial)
        path, source = partial / MODEL_FILE, load_model(original)
        smaller = quantized(source, scheme)
        save_model(smaller, path)
        left = left_float(smaller, source)
        del smaller, source
        lines = quantized_lines(_to_check(opened, scheme, path))
        require(*lines)
        found = Quantized(
            name=scheme,
            bytes_before=_size(original.parent),
            bytes_after=_size(partial),
            quality=None if chosen is None else _measured(opened, original, path, chosen, text),
            left=tuple(left),
            verify=tuple(lines),
            files={f"{folder.name}/{name}": digest for name, digest in digests(partial).items()},
        )
    _record(opened.path, found)
    return found


def folder_quantized_lines(
    opened: Opened, shapes: tuple[tuple[int, int], ...] = SHAPES_BT
) -> list[Verification]:
    """Check every quantized model of a folder.

    Raises:
        DataError: if a model is damaged.
    """
    lines = []
    for scheme in quantized_schemes(opened.path):
        path = opened.path / quantized_folder(scheme) / MODEL_FILE
        lines += quantized_lines(replace(_to_check(opened, scheme, path), shapes=shapes))
    return lines


def quantized_schemes(folder: Path) -> list[str]:
    """Return the schemes in which a folder holds a quantized model."""
    schemes = [scheme for scheme in get_args(Quantize) if scheme != "none"]
    return [scheme for scheme in schemes if (folder / quantized_folder(scheme) / MODEL_FILE).is_file()]


def recorded_files(report: Report) -> Mapping[str, str]:
    """Return the digests of a report: of the files written with the folder, and of quantized models."""
    return {
        **report.files,
        **{name: digest for one in report.quantized for name, digest in one.files.items()},
    }


def _to_check(opened: Opened, scheme: str, path: Path) -> QuantizedModel:
    original = opened.path / FOLDER / MODEL_FILE
    return QuantizedModel(
        quantized_folder(scheme),
        path,
        original if original.is_file() else None,
        opened.known_tokens,
        named_context(opened.config),
    )


def _copy_configs(source: Path, folder: Path) -> None:
    """Copy everything but the model: both are opened in the same way."""
    model = shutil.ignore_patterns(MODEL_FILE, f"{MODEL_FILE}.data")
    shutil.copytree(source, folder, ignore=model, dirs_exist_ok=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{MODEL_FILE}*"))


def _text_of(opened: Opened, text: TextSettings) -> MeasuredText | None:
    """Return the text to measure on; None if none was named and the decoder knows no text of ours."""
    chosen = TextChoice(text)
    chosen.check()
    path = opened.path / _REPORT
    settings = load_report(path).settings if path.is_file() else None
    of_demo = settings is not None and settings.get("model", {}).get("model") == "demo"
    origin = "demo" if of_demo else "folder"
    source = Source(opened.decoder, opened.tokenizer, opened.config, str(opened.path), origin)
    texts = texts_to_measure(source, chosen)
    return texts[0] if texts else None


def _measured(
    opened: Opened, original: Path, path: Path, text: MeasuredText, settings: TextSettings
) -> QuantizedQuality:
    """Compare both models on a text, as ONNX Runtime's CPU provider runs them."""
    found = compare_on_text(
        _whole(original),
        _whole(path),
        text.tokens,
        context=min(_CONTEXT, longest_context(opened.config)),
        windows=settings.eval_windows,
        text=text.about,
    )
    return QuantizedQuality(
        kl=found.agreement.kl_nats,
        top1=found.agreement.top1,
        perplexity_before=found.dense.value,
        perplexity_after=found.pruned.value,
        protocol=Protocol(**found.pruned.protocol),
    )


def _whole(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a model as a function from whole texts (B, T) to logits (B, T, V)."""
    if not takes_cache(path):
        return OnnxDecoder(path)
    session = CachedSession(path)
    return lambda ids: session.decoder()(ids)


def _record(folder: Path, found: Quantized) -> None:
    """Add the figures to the folder's report, card and page; a model of this name was there before."""
    path = folder / _REPORT
    if not path.is_file():
        return
    report = load_report(path)
    others = tuple(one for one in report.quantized if one.name != found.name)
    report = replace(report, quantized=(*others, found))
    save_report(report, path)
    card = folder / "README.md"
    if card.is_file():
        text = with_quantized_section(card.read_text(encoding="utf-8"), report)
        with replacing(card) as partial:
            partial.write_text(text, encoding="utf-8")
    write_page(folder)
