"""Check an ONNX model with quantized weights against the float model that it was made from.

    rounds                  every number in 8 bits is at most half a step from its original, and everything
                            but weights is unchanged
    stays near              no weight in 4 bits, which a text has rounded, is far from its original as a whole
    model = dequantized     the model, with inputs of products as they are, computes what plain products of
                            the dequantized weights compute: with and without a cache, and with padding
    integer products        the model as it is written runs in the same ways on texts, and differs by no more
                            than the rounding of its inputs

All read the packed numbers by the definition of the operators, without the tool that packed them.  The loss
by quantization itself is measured on a text, not compared.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from dispfx.deploy.onnx.dequantize import dequantized, rounding, with_float_products
from dispfx.deploy.onnx.files import load_model, save_model
from dispfx.deploy.onnx.quantize import BY_TEXT
from dispfx.verification.equivalence import SHAPES_BT, Verification
from dispfx.verification.onnx_model import ModelPair, model_lines

# Float products of the same numbers in another order.
TOLERANCE = 1e-3
# Inputs of 8 bits changed logits by 1% of the largest in a decoder of two layers, and by 9% in one of 30.
_INTEGER_TOLERANCE = 0.3
# Half a step, and what float32 rounds.
_HALF_STEP = 0.501


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized model and its original.

    Args:
        name: of the model's folder.
        path: of the model.
        original: path of the float model, or None if it is not there any more.
        vocabulary_size: token ids are drawn below it.
        context: most tokens that the decoder takes, or None.
        shapes: (batch, tokens) of whole texts.
    """

    name: str
    path: Path
    original: Path | None
    vocabulary_size: int
    context: int | None = None
    shapes: tuple[tuple[int, int], ...] = SHAPES_BT


def quantized_lines(found: QuantizedModel) -> list[Verification]:
    """Return the comparisons of a quantized model.

    Raises:
        DataError: if a model is damaged.
    """
    model = load_model(found.path)
    lines = []
    if found.original is not None:
        far = rounding(model, load_model(found.original))
        lines.append(Verification(f"{found.name} rounds onnx", (), far.steps, far.steps, _HALF_STEP))
        if far.change != 0:
            name = f"{found.name} stays near onnx"
            lines.append(Verification(name, (), far.change, far.change, BY_TEXT.near))
    # ONNX Runtime reads files; these are as large as the float model.
    with tempfile.TemporaryDirectory(prefix="dispfx-dequantized-") as folder:
        paths = Path(folder, "exact.onnx"), Path(folder, "dequantized.onnx")
        for path, twin in zip(paths, (with_float_products(model), dequantized(model)), strict=True):
            save_model(twin, path)
        exact, reference = paths
        pair = ModelPair(
            f"{found.name} = dequantized",
            expected=reference,
            actual=exact,
            vocabulary_size=found.vocabulary_size,
            shapes=found.shapes,
            context=found.context,
            tolerance=TOLERANCE,
        )
        written = replace(
            pair,
            name=f"{found.name}, integer products = dequantized",
            actual=found.path,
            tolerance=_INTEGER_TOLERANCE,
            random_caches=False,
        )
        return lines + model_lines(pair) + model_lines(written)
