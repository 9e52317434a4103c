"""Models on disk: written atomically with external weights in the same folder, and checked when read.

Every path to weights is relative and stays in the model's own folder, so the folder can be moved, and an
untrusted model cannot read other files.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from dispfx.deploy.onnx.exporting import silence
from dispfx.errors import DataError, OutputError, UnsupportedGraphError
from dispfx.files.unreadable import reason_and_hint
from dispfx.words.option_names import option

MODEL_FILE = "model.onnx"
# A protobuf message holds at most 2 GB; weights are stored externally well below that.
MAX_INLINE_BYTES = 2**27
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


def save_model(model: ir.Model, path: Path, *, max_inline_bytes: int = MAX_INLINE_BYTES) -> None:
    """Write `model` to `path`, and large weights to `<name>.data` in the same folder.

    The files appear when they are complete and `onnx.checker` accepts them.

    Args:
        max_inline_bytes: up to this size, weights are stored in the model file.

    Raises:
        OutputError: if the files cannot be written.
        UnsupportedGraphError: if onnx refuses the model.
    """
    if not path.parent.is_dir():
        raise OutputError("the folder of the ONNX model does not exist", where=str(path.parent))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.partial-", dir=path.parent) as partial:
            _save(model, Path(partial, path.name), max_inline_bytes)
            # The model goes last: it is complete once it has its name.
            for file in sorted(Path(partial).iterdir(), key=lambda file: file.name == path.name):
                shutil.move(file, path.parent / file.name)
    except OSError as error:
        raise OutputError(f"the ONNX model cannot be written: {error}", where=str(path)) from error


def _save(model: ir.Model, path: Path, max_inline_bytes: int) -> None:
    for value in model.graph.initializers.values():
        _order_rows(value)
    tensors = [value.const_value for value in model.graph.initializers.values()]
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if size <= max_inline_bytes:
        # Otherwise weights read from disk would go on naming the file that they came from.
        ir.external_data.load_to_model(model)
    with silence():
        ir.save(model, path, external_data=f"{path.name}.data" if size > max_inline_bytes else None)
        try:
            onnx.checker.check_model(str(path), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UnsupportedGraphError(
                f"the exporter made a model that onnx refuses: {error}",
                hint=f"compile with {option('export', 'none')}",
            ) from error


def _order_rows(value: ir.Value) -> None:
    """Let a transposed weight be copied into the order of its rows when it is written, and only then.

    The exporter transposes weights without copying, and numpy writes such an array number by number.
    """
    tensor = value.const_value
    if not isinstance(tensor, ir.Tensor) or not isinstance(tensor.raw, np.ndarray):
        return
    numbers = tensor.raw
    if numbers.flags.c_contiguous or numbers.ndim != 2 or numbers.itemsize not in _INTEGERS:
        return

    def ordered() -> ir.Tensor:
        # torch copies in blocks and with several threads, and has no name for some types of numpy's.
        bits = torch.from_numpy(numbers.view(_INTEGERS[numbers.itemsize]))
        return ir.Tensor(bits.contiguous().numpy().view(numbers.dtype), dtype=tensor.dtype, name=tensor.name)

    value.const_value = ir.LazyTensor(ordered, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)


def load_model(path: Path) -> ir.Model:
    """Return a model from disk; its weights are read when they are needed.

    Raises:
        DataError: as `check_external_data`, or if the file holds no model.
    """
    check_external_data(path)
    try:
        model = ir.load(path)
    except Exception as error:
        # What protobuf reads can still be no graph, and the library has errors of many kinds for that.
        reason, hint = reason_and_hint(path, error)
        raise DataError(f"the ONNX model cannot be read: {reason}", where=str(path), hint=hint) from error
    if not model.graph.outputs:  # an empty file is a message without fields
        raise DataError("the ONNX model is empty or damaged", where=str(path), hint="export it again")
    return model


def takes_cache(path: Path) -> bool:
    """Whether a model on disk takes a cache.

    Raises:
        DataError: as `check_external_data`.
    """
    # protobuf gives a name that is no UTF-8 as bytes.
    names = [str(value.name) for value in load_model(path).graph.inputs]
    return any(name.startswith("past_key_values.") for name in names)


def takes_padding(path: Path) -> bool:
    """Whether a model on disk reads its attention mask.

    Raises:
        DataError: as `check_external_data`.
    """
    return any(value.name == "attention_mask" and value.uses() for value in load_model(path).graph.inputs)


def check_external_data(path: Path) -> None:
    """Refuse a model whose weights lie anywhere but in its own folder.

    Raises:
        DataError: naming the entry, or if the file is missing or no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        # protobuf's DecodeError has no public name; a damaged file is the only cause left.
        reason, hint = reason_and_hint(path, error)
        raise DataError(f"the ONNX model cannot be read: {reason}", where=str(path), hint=hint) from error
    for tensor in _external_tensors(model):
        places = [entry.value for entry in tensor.external_data if entry.key == "location"]
        # Of two places, one reader takes the first and another the last.
        if len(places) != 1 or not _lies_in(path.parent, places[0]):
            raise DataError(
                f"the weights {tensor.name} must be in the folder of the model, not in "
                f"{' and '.join(map(repr, places)) or 'no file'}",
                where=str(path),
            )


def _lies_in(folder: Path, location: str | bytes) -> bool:
    """Whether a relative path stays in a folder, links followed; what is no UTF-8 comes as bytes."""
    if not location or isinstance(location, bytes) or "\0" in location or Path(location).is_absolute():
        return False
    try:
        return (folder / location).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False  # a loop of links


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
