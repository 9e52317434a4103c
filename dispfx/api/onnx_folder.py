"""DIR/onnx: the ONNX model of an output folder, verified before it appears."""

from pathlib import Path

import torch
from torch import fx, nn

from dispfx.deploy import onnx
from dispfx.deploy.checkpoint import own_config, own_generation_config
from dispfx.deploy.folder import new_folder
from dispfx.deploy.section import CONFIG_FILE
from dispfx.errors import OutputError
from dispfx.measure.equivalence import Verification, random_token_ids, require
from dispfx.source import load_folder_tokenizer

FOLDER = "onnx"

# ONNX Runtime has kernels of its own: softmax, norms and products sum in other orders.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}


def write_onnx(
    folder: Path,
    fast: fx.GraphModule,
    reference: nn.Module,
    vocabulary_size: int,
    *,
    opset: int | None = None,
) -> list[Verification]:
    """Write `folder`/onnx if ONNX Runtime gives the reference's logits, and return the comparisons.

    Args:
        folder: an output folder, which may still be private.
        fast: the decoder with gather-add writes.
        reference: the decoder as reloaded from the folder.

    Raises:
        VerificationError: if a comparison does not hold; nothing is left behind.
        UnsupportedGraphError: if the exporter cannot translate the decoder.
    """
    sample = random_token_ids(vocabulary_size, (2, 8), device=next(fast.parameters()).device)
    known = (folder / CONFIG_FILE).is_file()
    config = own_config(folder) if known else None
    with new_folder(folder / FOLDER) as partial:
        path = onnx.write_onnx_folder(
            partial,
            fast,
            sample,
            config=config,
            generation_config=own_generation_config(folder) if known else None,
            tokenizer=load_folder_tokenizer(folder),
            opset=opset or onnx.OPSET,
        )
        lines = _compared(path, reference, vocabulary_size)
        require(*lines)
    return lines


def has_onnx(folder: Path) -> bool:
    """Whether an output folder holds an ONNX model."""
    return (folder / FOLDER / onnx.MODEL_FILE).is_file()


def onnx_lines(folder: Path, reference: nn.Module, vocabulary_size: int) -> list[Verification]:
    """Compare the folder's ONNX model with its checkpoint.

    Raises:
        DataError: if the model is damaged.
    """
    return _compared(folder / FOLDER / onnx.MODEL_FILE, reference, vocabulary_size)


def onnx_runner(folder: Path) -> onnx.OnnxDecoder:
    """Return the folder's ONNX model as a decoder.

    Raises:
        OutputError: if the folder has none.
    """
    if not has_onnx(folder):
        raise OutputError(
            "the folder has no ONNX model", where=str(folder), hint=f"dispfx export {folder} --onnx"
        )
    return onnx.OnnxDecoder(folder / FOLDER / onnx.MODEL_FILE)


def _compared(path: Path, reference: nn.Module, vocabulary_size: int) -> list[Verification]:
    parameter = next(reference.parameters())
    return onnx.verify_onnx(
        path,
        reference,
        tolerance=TOLERANCES.get(parameter.dtype, 1e-4),
        vocabulary_size=vocabulary_size,
        name="onnx = checkpoint",
        device=parameter.device,
    )
