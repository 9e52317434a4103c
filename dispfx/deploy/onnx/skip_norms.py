"""Let one kernel of ONNX Runtime add to the residual stream and normalize it.

    s = Add(a, b); y = RMSNormalization(s, w)    →    y, s = SkipSimplifiedLayerNormalization(a, b, w)
    s = Add(a, b); y = LayerNormalization(s, w, v)    →    y, s = SkipLayerNormalization(a, b, w, v)

The operators are ONNX Runtime's own (com.microsoft), so other runtimes refuse the model.

Rules:
1. Both operands and the sum are (B, T, D): nothing broadcasts.
2. The norm is over the last dimension, and its scale has the type of the sum.
"""

import onnx_ir as ir

from dispfx.deploy.onnx.patterns import size_of

DOMAIN = "com.microsoft"
_FUSED = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}


def fuse_skip_norms(model: ir.Model) -> int:
    """Rewrite the model in place and return how many norms were fused."""
    graph = model.graph
    norms = [node for node in graph if node.domain == "" and node.op_type in _FUSED]
    fused = sum(_fuse(graph, node) for node in norms)
    if fused:
        model.opset_imports[DOMAIN] = 1
        graph.sort()
    return fused


def _fuse(graph: ir.Graph, norm: ir.Node) -> bool:
    total = norm.inputs[0]
    add = None if total is None else total.producer()
    if (
        total is None
        or add is None
        or add.op_type != "Add"
        or add.domain != ""
        or not _fits(norm, add, total)
    ):
        return False
    y, old = norm.outputs[0], add.outputs[0]
    normed = ir.Value(name=f"{y.name}_fused", type=y.type, shape=y.shape)
    summed = ir.Value(name=f"{old.name}_fused", type=old.type, shape=old.shape)
    unused = [ir.Value(name=""), ir.Value(name="")]
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    node = ir.node(
        _FUSED[norm.op_type],
        [*add.inputs, *norm.inputs[1:]],
        attributes={"epsilon": epsilon},
        domain=DOMAIN,
        outputs=[normed, *unused, summed],
    )
    graph.insert_after(add, node)
    ir.convenience.replace_all_uses_with(y, normed, replace_graph_outputs=True)
    ir.convenience.replace_all_uses_with(old, summed, replace_graph_outputs=True)
    graph.remove([norm, add], safe=True)
    return True


def _fits(norm: ir.Node, add: ir.Node, total: ir.Value) -> bool:
    axis = norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    width, scale = size_of(total, 2, 3), norm.inputs[1]
    same = all(value is not None and value.shape == total.shape for value in add.inputs)
    typed = scale is not None and scale.dtype == total.dtype and norm.outputs[0].dtype == total.dtype
    return axis in (-1, 2) and width is not None and same and typed and len(norm.outputs) == 1
