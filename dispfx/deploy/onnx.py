"""A lowered decoder as an ONNX model: `input_ids` (batch, sequence) int64 -> `logits`.

`write_onnx_folder` writes the model with the config and tokenizer that clients look for beside it,
`verify_onnx` compares it with a reference on the CPU, and `OnnxDecoder` runs it.

The graph computes the whole sequence.  Both dimensions are free, also at sizes that the exporter did not
see: a batch of one, a sequence of one.
"""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, fx

from dispfx.capturing import export_program
from dispfx.deploy.onnx_graph import expand_rotary_tables, forget_sources, widen_scatter_indices
from dispfx.deploy.section import write_model_files
from dispfx.errors import DataError, OutputError, UnsupportedGraphError
from dispfx.measure.equivalence import SHAPES_BT, Verification, compare_decoders

MODEL_FILE = "model.onnx"
OPSET = 23
# A protobuf message holds 2 GB; the weights lie in a file beside the model well before that.
MAX_INLINE_BYTES = 2**30

_DIMS = {0: "batch", 1: "sequence"}


def write_onnx_folder(
    folder: Path,
    lowered: fx.GraphModule,
    sample_ids: Tensor,
    *,
    config: Any = None,
    architecture: str | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    opset: int = OPSET,
) -> Path:
    """Write `model.onnx` and the decoder's own config, generation config and tokenizer into `folder`.

    The config is the dense decoder's, without a word of ours: what clients read from it (vocabulary,
    layers, heads, position limits) is true of the pruned decoder too.

    Args:
        folder: exists; config, architecture, generation_config, tokenizer: as in `write_model_files`.

    Returns:
        The path of the model.

    Raises:
        OutputError, UnsupportedGraphError: as `export_onnx` does.
    """
    path = folder / MODEL_FILE
    export_onnx(lowered, path, sample_ids, opset=opset)
    if config is not None:
        write_model_files(
            folder,
            config=config,
            architecture=architecture,
            generation_config=generation_config,
            tokenizer=tokenizer,
        )
    return path


def export_onnx(
    lowered: fx.GraphModule,
    path: Path,
    sample_ids: Tensor,
    *,
    opset: int = OPSET,
    max_inline_bytes: int = MAX_INLINE_BYTES,
) -> None:
    """Write `lowered` to `path`; a model with more weights gets them in `<name>.data` beside it.

    The files appear when they are complete and `onnx.checker` accepts them.  Nothing is printed.

    Args:
        lowered: forward(input_ids (B, T)) -> logits (B, T, V).
        sample_ids: (B, T), both at least 2, on the decoder's device.
        max_inline_bytes: weights up to here lie in the model file itself.

    Raises:
        UnsupportedGraphError: if the exporter has no ONNX form for an operation, or the decoder is
            bfloat16, which ONNX Runtime cannot run on the CPU to verify it.
        OutputError: if the files cannot be written.
    """
    if any(parameter.dtype == torch.bfloat16 for parameter in lowered.parameters()):
        raise UnsupportedGraphError(
            "ONNX Runtime has no bfloat16 products on the CPU, so this model could not be verified",
            hint="compile with --dtype float32 or float16 to export ONNX",
        )
    if not path.parent.is_dir():
        raise OutputError("the folder of the ONNX model does not exist", where=str(path.parent))
    model = _onnx_model(lowered, sample_ids, opset)
    expand_rotary_tables(model.graph)
    widen_scatter_indices(model.graph)
    forget_sources(model)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.partial-", dir=path.parent) as partial:
            _save(model, Path(partial, path.name), max_inline_bytes)
            # The model goes last: it is complete once it has its name.
            for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == path.name):
                shutil.move(file, path.parent / file.name)
    except OSError as error:
        raise OutputError(f"the ONNX model cannot be written: {error}", where=str(path)) from error


class OnnxDecoder:
    """An ONNX model on the CPU: token ids (B, T) in, logits (B, T, V) out, both torch tensors.

    Raises:
        DataError: if the file is missing or damaged, or keeps weights outside its folder.
    """

    def __init__(self, path: Path):
        _check_external_data(path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            # ONNX Runtime has a dozen error classes without a common base; the file is the cause of all.
            raise DataError(f"ONNX Runtime refuses the model: {error}", where=str(path)) from error

    def __call__(self, ids: Tensor) -> Tensor:
        (logits,) = self._session.run(["logits"], {"input_ids": ids.cpu().numpy()})
        return torch.from_numpy(logits)


def verify_onnx(
    path: Path,
    reference: Callable[[Tensor], Tensor],
    *,
    tolerance: float,
    vocabulary_size: int,
    name: str = "onnx = lowered",
    shapes: Sequence[tuple[int, int]] = SHAPES_BT,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Verification]:
    """Compare the model on ONNX Runtime's CPU provider with `reference`, one line a shape.

    Args:
        reference: token ids (B, T) on `device` to logits (B, T, V).
        shapes: other sizes than the model was traced with.

    Raises:
        DataError: as `OnnxDecoder` does.
        VerificationError: if the logits differ in shape or dtype.
    """
    decoder = OnnxDecoder(path)
    return compare_decoders(
        name,
        reference,
        decoder,
        tolerance,
        vocabulary_size=vocabulary_size,
        shapes=shapes,
        seed=seed,
        device=device,
    )


def _onnx_model(lowered: fx.GraphModule, sample_ids: Tensor, opset: int) -> ir.Model:
    with _silence():
        exported = export_program(lowered, sample_ids)
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                opset_version=opset,
                input_names=["input_ids"],
                output_names=["logits"],
                dynamic_shapes=(_DIMS,),
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UnsupportedGraphError(
                f"the ONNX exporter cannot translate this decoder: {str(error).splitlines()[0]}",
                hint="compile with --export none, or --export pt2",
            ) from error
    assert program is not None
    return program.model


def _save(model: ir.Model, path: Path, max_inline_bytes: int) -> None:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    with _silence():
        ir.save(model, path, external_data=f"{path.name}.data" if size > max_inline_bytes else None)
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UnsupportedGraphError(
                f"the exporter made a model that onnx refuses: {error}", hint="compile with --export none"
            ) from error


def _check_external_data(path: Path) -> None:
    """Refuse a model whose weights lie anywhere but in its own folder.

    Raises:
        DataError: naming the entry, or if the file is missing or no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        # protobuf's DecodeError has no public name; a damaged file is the only cause left.
        raise DataError(f"the ONNX model cannot be read: {error}", where=str(path)) from error
    folder = path.parent.resolve()
    for tensor in _external_tensors(model):
        location = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
        inside = not Path(location).is_absolute() and (folder / location).resolve().is_relative_to(folder)
        if not location or not inside:
            raise DataError(
                f"the weights {tensor.name} must lie beside the model, not in {location!r}", where=str(path)
            )


def _external_tensors(message: Any) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a protobuf message, at any depth, whose bytes lie in another file."""
    stack = [message]
    while stack:
        at = stack.pop()
        if isinstance(at, onnx.TensorProto):
            if at.data_location == onnx.TensorProto.EXTERNAL:
                yield at
            continue
        for field, value in at.ListFields():
            if field.message_type is not None:
                stack.extend([value] if hasattr(value, "ListFields") else value)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's warnings and log lines, which concern its own insides, off the terminal."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
