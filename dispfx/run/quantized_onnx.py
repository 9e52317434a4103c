"""DIR/onnx-int4 and DIR/onnx-int8: the ONNX model of a folder with weights in fewer bits.

1. They are made from DIR/onnx, which was compared with the checkpoint.  A text says how weights are rounded
   to 4 bits.
2. The written model is checked against it, and then measured on a text next to it.
3. report.json, the card and the page get the figures, and `verify` knows the digests.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from torch import Tensor

from dispfx.deploy.digests import digests
from dispfx.deploy.folder import new_folder
from dispfx.deploy.onnx.files import MODEL_FILE, load_model, save_model, takes_cache
from dispfx.deploy.onnx.quantize import BY_TEXT, key, left_float, quantized
from dispfx.deploy.onnx.session import CachedSession, OnnxDecoder
from dispfx.deploy.onnx.twin import float32_twin
from dispfx.files.disk import replacing
from dispfx.quality.agreement import Comparison, compare_on_text
from dispfx.quantization.rounded_layers import layers_to_round, rounded_layers, weight_of_layer
from dispfx.quantization.rounding import Rounded
from dispfx.report import Protocol, Quantized, QuantizedQuality, Report, load_report, save_report
from dispfx.report.page import write_page
from dispfx.report.quantized import with_quantized_section
from dispfx.run.calibration import Calibration, calibration_of
from dispfx.run.folders import Opened
from dispfx.run.onnx_folder import FOLDER
from dispfx.run.run_text import MeasuredText
from dispfx.settings import TextSettings
from dispfx.settings.verb_settings import Quantize
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
        text: to round by, which int4 needs, and to measure on; the demo's own text or the project's second
            text by default.

    Raises:
        VerificationError: if the written model has other weights, or computes something else; it does not
            appear then.
        DataError: if a text is missing or cannot be used.
    """
    chosen = calibration_of(opened, text)
    if scheme == "int4":
        chosen.require(scheme)
    original = opened.path / FOLDER / MODEL_FILE
    folder = opened.path / quantized_folder(scheme)
    with new_folder(folder) as written:
        _copy_configs(original.parent, written)
        path, source = written / MODEL_FILE, load_model(original)
        smaller = quantized(source, _by_text(opened, chosen) if scheme == "int4" else None)
        save_model(smaller, path)
        left = left_float(smaller, source)
        del smaller, source
        lines = quantized_lines(_to_check(opened, scheme, path))
        require(*lines)
        found = Quantized(
            name=scheme,
            bytes_before=_size(original.parent),
            bytes_after=_size(written),
            quality=None
            if chosen.measured is None
            else _measured(opened, original, path, chosen.measured, text.eval_windows),
            left=tuple(left),
            verify=tuple(lines),
            files={f"{folder.name}/{name}": digest for name, digest in digests(written).items()},
            rounded_by=chosen.name if scheme == "int4" else "",
        )
    record(opened.path, found)
    return found


def _by_text(opened: Opened, chosen: Calibration) -> dict[str, Rounded]:
    """Round the decoder's layers by a text, by what their weights are known by in the ONNX model."""
    model = opened.decoder
    layers = layers_to_round(model)
    found = rounded_layers(model, layers, lambda layer: BY_TEXT, partial(chosen.on, opened.device))
    return {key(weight_of_layer(layers[path]).float().cpu().numpy()): one for path, one in found}


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


def short_context(opened: Opened) -> int:
    """Return the tokens of a window on which quantization is measured."""
    return min(_CONTEXT, longest_context(opened.config))


def quality_of(found: Comparison) -> QuantizedQuality:
    """Return what a report says of two decoders on a text."""
    return QuantizedQuality(
        kl=found.agreement.kl_nats,
        top1=found.agreement.top1,
        perplexity_before=found.dense.value,
        perplexity_after=found.pruned.value,
        protocol=Protocol(**found.pruned.protocol),
    )


def _measured(
    opened: Opened, original: Path, path: Path, text: MeasuredText, windows: int | None
) -> QuantizedQuality:
    """Compare both models on a text, as ONNX Runtime's CPU provider runs them."""
    context = short_context(opened)
    with TemporaryDirectory(prefix="dispfx-float32-") as folder:
        # ONNX Runtime's CPU provider does not run bfloat16.
        twin = Path(folder, MODEL_FILE)
        save_model(float32_twin(load_model(original)), twin)
        before, after = _whole(twin), _whole(path)
        return quality_of(
            compare_on_text(before, after, text.tokens, context=context, windows=windows, text=text.about)
        )


def _whole(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a model as a function from whole texts (B, T) to logits (B, T, V)."""
    if not takes_cache(path):
        return OnnxDecoder(path)
    session = CachedSession(path)
    return lambda ids: session.decoder()(ids)


def record(folder: Path, found: Quantized) -> None:
    """Add the figures to the folder's report, card and page, in the place of older ones."""
    path = folder / _REPORT
    if not path.is_file():
        return
    report = load_report(path)
    same = (found.name, found.form)
    others = tuple(one for one in report.quantized if (one.name, one.form) != same)
    report = replace(report, quantized=(*others, found))
    save_report(report, path)
    card = folder / "README.md"
    if card.is_file():
        text = with_quantized_section(card.read_text(encoding="utf-8"), report)
        with replacing(card) as partial:
            partial.write_text(text, encoding="utf-8")
    write_page(folder)
