"""The widths for which vLLM has a kernel for weights of 8 or 4 bits.

1. vLLM chooses a kernel by the device and the sizes of a weight.  It is asked with sizes that need no memory,
   before any weight is loaded.
2. Where vLLM has no kernel, the error names the module and the smallest alignment with which all pruned
   widths have one.  Dense widths stay as they are.
3. No kernel computes in float32.  vLLM does not look, and would fail at the first token.
"""

from typing import Any

import torch
from torch import nn

from dispfx.serving.fused_layers import FusedLayer, unserved
from dispfx.serving.rounded_weights import RoundedWeights

_ALIGNMENTS = (8, 16, 32, 64, 128, 256)


def require_kernel(
    layer: Any,
    product: Any,
    served: FusedLayer,
    rounded: RoundedWeights,
    sizes: tuple[int, list[int]],
    dtype: torch.dtype,
) -> None:
    """Pass if vLLM can multiply with the rounded weight of a layer.

    Args:
        layer: of vLLM, with its true input and output sizes.
        product: vLLM's method for it.
        served: what the layer stands for.
        rounded: the rounded layers of the folder.
        sizes: inputs, and outputs by the parts of the product, of this rank.
        dtype: in which vLLM computes.

    Raises:
        OutputError: naming the module.
    """
    inputs, outputs = sizes
    ranks = layer.input_size // inputs, max(1, layer.output_size // sum(outputs))

    def problem(inputs: int, outputs: list[int]) -> Exception | None:
        if not rounded.fills_words(inputs, outputs):
            return ValueError("codes do not fill words of 32 bits")
        probe = nn.Module()
        probe.scheme = layer.scheme
        whole = inputs * ranks[0], sum(outputs) * ranks[1]
        try:
            with torch.device("meta"):
                product.create_weights(
                    probe, inputs, outputs, *whole, dtype, weight_loader=layer.weight_loader
                )
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            return error
        return None

    found = problem(inputs, outputs)
    if found is None and dtype != torch.float32:
        return
    if found is None:
        raise unserved(
            served.path,
            f"its kernels for {rounded.scheme} weights do not compute in float32",
            hint="serve with --dtype float16 or bfloat16",
        )
    what = f"it has no kernel for {rounded.scheme} weights of {inputs} → {sum(outputs)} features here"
    for align in _ALIGNMENTS:
        if problem(*_aligned(served, inputs, outputs, align)) is None:
            hint = f"compile with --align {align * max(ranks)}, then export again"
            raise unserved(served.path, what, hint=hint) from found
    reasons = " ".join(str(found).rpartition("Reasons:")[2].split())
    raise unserved(
        served.path,
        f"{what}{reasons and f' ({reasons})'}",
        hint="serve other weights (docs/serving.md#weights-of-8-or-4-bits), or the folder with plain ones",
    ) from found


def _aligned(served: FusedLayer, inputs: int, outputs: list[int], align: int) -> tuple[int, list[int]]:
    """Return the sizes with others for pruned ones (rule 2): an odd multiple, so that it stands for all."""
    cut = [kept is not None for kept in served.outputs]
    cut = cut if len(cut) == len(outputs) else cut[:1] * len(outputs)
    wider = inputs if served.inputs is None else 3 * align
    return wider, [3 * align if pruned else size for size, pruned in zip(outputs, cut, strict=True)]
