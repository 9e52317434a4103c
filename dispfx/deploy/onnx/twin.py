"""The float32 twin of a model in half precision: the same graph up to types, with the same weights.

ONNX Runtime has no bfloat16 products on the CPU.  The twin runs there, and so shows whether the graph is
right; the rounding of bfloat16 is the GPU's.  A model is also quantized from its twin.
"""

import numpy as np
import onnx_ir as ir

_OLD, _NEW = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16), ir.DataType.FLOAT


def float32_twin(model: ir.Model) -> ir.Model:
    """Return a copy of `model` in which everything in half precision is float32; `model` is not changed."""
    twin = model.clone()
    graph = twin.graph
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _OLD:
            value.const_value = ir.tensor(tensor.numpy().astype(np.float32), name=value.name)
            value.type = ir.TensorType(_NEW)
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        if value.dtype in _OLD:
            value.type = ir.TensorType(_NEW)
    for node in graph:
        _retype_attributes(node)
    return twin


def _retype_attributes(node: ir.Node) -> None:
    """Let a cast to half precision, or a constant of that type, be float32."""
    for name in ("to", "dtype"):
        attribute = node.attributes.get(name)
        if attribute is not None and attribute.as_int() in map(int, _OLD):
            node.attributes[name] = ir.AttrInt64(name, int(_NEW))
    value = node.attributes.get("value")
    if value is not None and value.type == ir.AttributeType.TENSOR and value.as_tensor().dtype in _OLD:
        node.attributes["value"] = ir.AttrTensor(
            "value", ir.tensor(value.as_tensor().numpy().astype(np.float32))
        )


def differences_beyond_types(one: ir.Model, other: ir.Model) -> list[str]:
    """Return where two models differ in more than types: operators, wiring, attributes, shapes, weights.

    Weights are equal if their values are: a number in half precision is a float32 number.
    """
    first, second = list(one.graph), list(other.graph)
    if len(first) != len(second):
        return [f"{len(first)} nodes against {len(second)}"]
    found = [
        f"{node.op_type} {node.outputs[0].name}"
        for node, twin in zip(first, second, strict=True)
        if outline(node) != outline(twin)
    ]
    weights, others = one.graph.initializers, other.graph.initializers
    found += sorted(weights.keys() ^ others.keys())
    return found + [name for name in weights.keys() & others.keys() if not _same(weights[name], others[name])]


def outline(node: ir.Node) -> tuple[object, ...]:
    """Return what a node computes and from what: operator, inputs, outputs, attributes except for types."""
    attributes = {
        name: attribute.value
        for name, attribute in node.attributes.items()
        if name not in ("to", "dtype") and attribute.type != ir.AttributeType.TENSOR
    }
    inputs = [None if value is None else value.name for value in node.inputs]
    return node.domain, node.op_type, inputs, [value.name for value in node.outputs], attributes


def _same(one: ir.Value, other: ir.Value) -> bool:
    left, right = one.const_value, other.const_value
    if left is None or right is None or tuple(left.shape) != tuple(right.shape):
        return False
    if left.dtype in _OLD or right.dtype in _OLD:
        return bool((left.numpy().astype(np.float32) == right.numpy().astype(np.float32)).all())
    return bool((left.numpy() == right.numpy()).all())
