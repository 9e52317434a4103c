"""DIR/onnx-int4 and DIR/onnx-int8: the ONNX model of a folder with weights of 4 or 8 bits.

1. The model is made from DIR/onnx, which was compared with the checkpoint.  Calibration data decides how
   weights are rounded to 4 bits; 8 bits are rounded to nearest.
2. The written model is checked against DIR/onnx, and both are measured on a text.
3. report.json, the card and the page get the figures, and report.json the digests, which `verify` compares.
"""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from dispfx.deploy.digests import digests
from dispfx.deploy.folder import new_folder
from dispfx.deploy.onnx.files import MODEL_FILE, load_model, save_model, takes_cache
from dispfx.deploy.onnx.quantize import BY_TEXT, key, left_float, quantized
from dispfx.deploy.onnx.session import CachedSession, OnnxDecoder
from dispfx.quality.agreement import compare_on_text
from dispfx.quantization.rounded_layers import layers_to_round, rounded_layers, weight_of_layer
from dispfx.quantization.weight_rounding import Rounded
from dispfx.report import Quantized, QuantizedQuality
from dispfx.run.calibration import Calibration, calibration_of
from dispfx.run.folders import Opened
from dispfx.run.onnx_folder import FOLDER
from dispfx.run.quantized_record import keep_figures, quality_of, record, short_context
from dispfx.run.run_text import MeasuredText
from dispfx.settings import TextSettings
from dispfx.settings.verb_settings import Quantize
from dispfx.source.source import named_context
from dispfx.verification.equivalence import SHAPES_BT, Verification, require
from dispfx.verification.onnx_model import float32_file
from dispfx.verification.quantized_model import QuantizedModel, quantized_lines


def quantized_onnx_folder(scheme: str) -> str:
    """Return the name of the folder of a quantized ONNX model."""
    return f"{FOLDER}-{scheme}"


def write_quantized_onnx(opened: Opened, scheme: Quantize, text: TextSettings) -> Quantized:
    """Write `onnx-<scheme>/` from `onnx/`, checked and measured, and return what a report says of it.

    Args:
        opened: an output folder with an ONNX model.
        scheme: int4 or int8.
        text: calibration data, which int4 needs, and the text to measure on.  Defaults: the demo's own text
            for the demo, otherwise the short text that comes with dispfx, to measure on only.

    Raises:
        VerificationError: if the written model has other weights or computes something else; then no folder
            is written.
        DataError: if a text is missing or cannot be used.
    """
    chosen = calibration_of(opened, scheme, text)
    original = opened.path / FOLDER / MODEL_FILE
    folder = opened.path / quantized_onnx_folder(scheme)
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
        keep_figures(written, found)
    return record(opened.path, folder)


def _by_text(opened: Opened, chosen: Calibration) -> dict[str, Rounded]:
    """Round the decoder's layers; return them by the `key` of the weight that each one replaces."""
    model = opened.decoder
    layers = layers_to_round(model)
    found = rounded_layers(model, layers, lambda layer: BY_TEXT, partial(chosen.on, opened.device))
    return {key(weight_of_layer(layers[path]).float().cpu().numpy()): one for path, one in found}


def quantized_onnx_lines(
    opened: Opened, shapes: tuple[tuple[int, int], ...] = SHAPES_BT
) -> list[Verification]:
    """Check every quantized ONNX model of a folder.

    Raises:
        DataError: if a model is damaged.
    """
    lines = []
    for scheme in quantized_onnx_schemes(opened.path):
        path = opened.path / quantized_onnx_folder(scheme) / MODEL_FILE
        lines += quantized_lines(replace(_to_check(opened, scheme, path), shapes=shapes))
    return lines


def quantized_onnx_schemes(folder: Path) -> list[str]:
    """Return the schemes in which a folder holds a quantized ONNX model."""
    schemes = [scheme for scheme in get_args(Quantize) if scheme != "none"]
    return [scheme for scheme in schemes if (folder / quantized_onnx_folder(scheme) / MODEL_FILE).is_file()]


def _to_check(opened: Opened, scheme: str, path: Path) -> QuantizedModel:
    original = opened.path / FOLDER / MODEL_FILE
    return QuantizedModel(
        quantized_onnx_folder(scheme),
        path,
        original if original.is_file() else None,
        opened.known_tokens,
        named_context(opened.config),
    )


def _copy_configs(source: Path, folder: Path) -> None:
    """Copy everything but the model: quantization changes nothing about how it is opened."""
    model = shutil.ignore_patterns(MODEL_FILE, f"{MODEL_FILE}.data")
    shutil.copytree(source, folder, ignore=model, dirs_exist_ok=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{MODEL_FILE}*"))


def _measured(
    opened: Opened, original: Path, path: Path, text: MeasuredText, windows: int | None
) -> QuantizedQuality:
    """Compare both models on a text, in ONNX Runtime's CPU provider."""
    context = short_context(opened)
    is_float = next(opened.decoder.parameters()).dtype == torch.float32
    # ONNX Runtime's CPU provider does not run bfloat16.
    with nullcontext(original) if is_float else float32_file(original) as twin:
        before, after = _whole(twin), _whole(path)
        return quality_of(
            compare_on_text(before, after, text.tokens, context=context, windows=windows, text=text.about)
        )


def _whole(path: Path) -> Callable[[Tensor], Tensor]:
    """Return a model as a function from token ids (B, T) to logits (B, T, V)."""
    if not takes_cache(path):
        return OnnxDecoder(path)
    session = CachedSession(path)
    return lambda ids: session.decoder()(ids)
