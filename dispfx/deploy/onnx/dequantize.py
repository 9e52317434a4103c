"""What a quantized model must compute, from the definition of its operators and without ONNX Runtime's tool.

    w = scale · (number − zero point)        of the group that the number is in

`dequantized` replaces packed weights by these numbers.  `rounding` compares them with the weights of the
model that was quantized.  `with_float_products` lets the kernels take their inputs unrounded, so that
both can be compared closely.

Shape legend: K input width, N output width, V vocabulary, G groups of a row, S numbers of a group.
"""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from dispfx.deploy.onnx.quantize import BY_TEXT, DOMAIN, PRODUCT, weight_of
from dispfx.deploy.onnx.twin import float32_twin, outline

_PACKED = ("MatMulNBits", "GatherBlockQuantized")
_TINY = 1e-30


def with_float_products(model: ir.Model) -> ir.Model:
    """Return a copy of a quantized model whose products take their inputs as they are."""
    twin = model.clone()
    for node in twin.graph:
        if node.domain == DOMAIN and node.op_type == "MatMulNBits":
            node.attributes.pop("accuracy_level", None)
    return twin


def dequantized(model: ir.Model) -> ir.Model:
    """Return a copy of a quantized model with plain products and lookups of float32 weights."""
    twin = model.clone()
    graph = twin.graph
    for node in [node for node in graph if _is_packed(node)]:
        weight = ir.Value(name=f"{node.outputs[0].name}_weight")
        numbers = _weights(node)[0]
        weight.const_value = ir.tensor(numbers, name=weight.name)
        weight.shape, weight.type = ir.Shape(numbers.shape), ir.TensorType(ir.DataType.FLOAT)
        graph.register_initializer(weight)
        product = node.op_type == "MatMulNBits"
        inputs = [node.inputs[0], weight] if product else [weight, node.inputs[1]]
        old = node.outputs[0]
        made = ir.node(
            "MatMul" if product else "Gather",
            inputs,
            outputs=[ir.Value(name=old.name, type=old.type, shape=old.shape)],
            name=node.name,
        )
        ir.convenience.replace_nodes_and_values(graph, node, [node], [made], [old], made.outputs)
    common.RemoveUnusedNodesPass()(twin)
    return twin


@dataclass(frozen=True)
class Rounding:
    """How far dequantized weights are from their originals; infinite if anything else differs.

    Args:
        steps: the largest distance of a number in 8 bits, in steps of its group; 0.5 at most if every one was
            rounded to the nearest.
        change: the largest change of a weight in 4 bits, as a part of the weight's root mean square.
    """

    steps: float = 0.0
    change: float = 0.0


def rounding(model: ir.Model, original: ir.Model) -> Rounding:
    """Compare the weights of a quantized model with those of the model that it was made from."""
    source = float32_twin(original)
    known = {node.outputs[0].name: node for node in source.graph}
    replaced, worst = set(), Rounding()
    for node in [node for node in model.graph if _is_packed(node)]:
        name = _original_output(node)
        before = known.get(name)
        found, steps = _weights(node)
        expected = None if before is None else _original(before)
        if expected is None or found.size != expected.size:
            return Rounding(float("inf"), float("inf"))
        replaced.add(name)
        expected = expected.reshape(found.shape)
        if node.attributes["bits"].as_int() == BY_TEXT.bits:
            change = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), _TINY)
            worst = replace(worst, change=_larger(worst.change, float(change)))
        else:
            worst = replace(worst, steps=_larger(worst.steps, _largest(np.abs(found - expected), steps)))
    return Rounding(float("inf"), float("inf")) if _others_differ(model, source, replaced) else worst


def _original(node: ir.Node) -> np.ndarray | None:
    """Return the weight of a plain product or lookup."""
    if node.op_type == "Gather":
        return _constant(node.inputs[0])
    weight = weight_of(node)
    return None if weight is None else weight.numbers


def _larger(one: float, other: float) -> float:
    """Return the larger number, and NaN if one is no number, which `max` may skip."""
    return float(np.maximum(one, other))


def _largest(distances: np.ndarray, steps: np.ndarray) -> float:
    """Return the largest distance in steps; a group of zeros has steps of 0, and may have no distance."""
    if (distances[steps == 0] > 0).any():
        return float("inf")
    return float(np.divide(distances, steps, out=np.zeros_like(distances), where=steps != 0).max())


def _others_differ(model: ir.Model, source: ir.Model, replaced: set[str | None]) -> bool:
    """Whether a node or weight of the source that was not replaced is missing or another one."""
    outlines = [outline(node) for node in model.graph]
    kept = [node for node in source.graph if not _is_gone(node, replaced)]
    if any(outline(node) not in outlines for node in kept):
        return True
    before, after = source.graph.initializers, model.graph.initializers
    names = {str(value.name) for node in kept for value in node.inputs if value is not None}
    return any(
        name not in after or _bits(before[name]) != _bits(after[name]) for name in names & before.keys()
    )


def _is_gone(node: ir.Node, replaced: set[str | None]) -> bool:
    """Whether a node was replaced, or transposes a weight for replaced nodes only."""
    if node.outputs[0].name in replaced:
        return True
    users = {user.outputs[0].name for user, _ in node.outputs[0].uses()}
    turns = node.op_type == "Transpose" and node.inputs[0] is not None and node.inputs[0].is_initializer()
    return turns and users <= replaced


def _bits(value: ir.Value) -> tuple[object, ...]:
    tensor = value.const_value
    assert tensor is not None
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes()


def _is_packed(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in _PACKED


def _original_output(node: ir.Node) -> str:
    """Return the name of the output that the replaced node had."""
    name = str(node.outputs[0].name)
    return name.removesuffix(PRODUCT).removesuffix("_groups")


def _weights(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a node as its plain form reads them, and the step of each."""
    return _of_product(node) if node.op_type == "MatMulNBits" else _of_lookup(node)


def _of_product(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Return (K, N) weights and steps."""
    width, columns, bits, size = (node.attributes[name].as_int() for name in ("K", "N", "bits", "block_size"))
    data_NGS, scales, zeros = (_constant(value) for value in node.inputs[1:4])
    scales_NG = scales.reshape(columns, -1)
    numbers_NGS = _unpacked(data_NGS, bits).reshape(columns, -1, size)
    zeros_NG = _unpacked(zeros.reshape(columns, -1), bits)[:, : scales_NG.shape[1]]
    weights_NGS = (numbers_NGS - zeros_NG[..., None]) * scales_NG[..., None]
    steps_NGS = np.broadcast_to(scales_NG[..., None], weights_NGS.shape)
    weights, steps = (found.reshape(columns, -1)[:, :width].T for found in (weights_NGS, steps_NGS))
    return np.ascontiguousarray(weights), np.abs(steps)


def _of_lookup(node: ir.Node) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and steps in the shape of the data, (V, D) or (V, G, S)."""
    size, axis = node.attributes["block_size"].as_int(), node.attributes["quantize_axis"].as_int()
    data, scales, zeros = (_constant(node.inputs[index]) for index in (0, 2, 3))
    scales, zeros = (
        np.repeat(found, size, axis)[..., : data.shape[axis]] for found in (scales, zeros.astype(np.float32))
    )
    return (data.astype(np.float32) - zeros) * scales, np.abs(scales)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of bytes as float32; a byte of 4-bit numbers holds the first in its low half."""
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return packed.astype(np.float32)


def _constant(value: ir.Value | None) -> np.ndarray:
    """Return an initializer, or the Unsqueeze of one."""
    assert value is not None
    node = value.producer()
    if node is not None and node.op_type == "Unsqueeze":
        return _constant(node.inputs[0])[..., None]
    assert value.const_value is not None
    return value.const_value.numpy()
