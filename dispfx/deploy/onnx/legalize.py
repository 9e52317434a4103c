"""Turn what the exporter wrote into what ONNX Runtime's fast kernels take, the same function.

    RMSNormalization, Gather, MatMul × 3, RotaryEmbedding × 2, Attention, MatMul, Gather, Add,
    RMSNormalization, Gather, MatMul × 2, Sigmoid, Mul × 2, MatMul, Gather, Add

is what a pruned layer of a plain decoder becomes, and the same without the four Gathers what a dense one
does.  The steps, in this order, are files of their own:

    repairs     what the exporter writes wrongly: tables of rotations, types of indices
    zeros       no Pad: a pruned feature is a zero that nobody computed
    rotary      parts of a rotation → RotaryEmbedding
    attention   repeated heads, cache and transpositions → Attention's own
    mask        one mask in the type of the scores, outside the layers
    skip_norms  addition and norm in one kernel, where ONNX Runtime's own operators are asked for

Then equal values are computed once and values that nobody reads are gone.
"""

from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from dispfx.deploy.onnx.attention import legalize_attention
from dispfx.deploy.onnx.mask import legalize_masks
from dispfx.deploy.onnx.repairs import expand_rotary_tables, forget_sources, type_norms, widen_scatter_indices
from dispfx.deploy.onnx.rotary import FormRotations
from dispfx.deploy.onnx.skip_norms import fuse_skip_norms
from dispfx.deploy.onnx.zeros import replace_pads

# Of the standard operator set.
FIRST_WITH_ROTATIONS = 23


@dataclass(frozen=True)
class Flavor:
    """What a model is for.

    Args:
        padding: whether the texts of a batch may be padded; without, attention needs no mask, which is
            faster, and every text of a batch must have the same length.
        ort_fusions: whether to use operators of ONNX Runtime's own.
    """

    padding: bool = True
    ort_fusions: bool = False


PLAIN = Flavor()


def legalize(model: ir.Model, flavor: Flavor = PLAIN) -> None:
    """Rewrite the model in place."""
    graph = model.graph
    if model.opset_imports.get("", 0) >= FIRST_WITH_ROTATIONS:
        FormRotations(graph).run()
    widen_scatter_indices(graph)
    type_norms(graph)
    replace_pads(graph)
    expand_rotary_tables(graph)
    legalize_attention(graph)
    legalize_masks(graph, padding=flavor.padding)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    if flavor.ort_fusions:
        fuse_skip_norms(model)
    graph.sort()
    forget_sources(model)
