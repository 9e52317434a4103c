"""Replace a padded column of zeros that a gather reads by zeros that nobody computed.

    Gather(Pad(x, one zero after the last), inverse)    →    Where(kept, Gather(x, inverse′), 0)

ONNX Runtime's Pad copies the whole value and has no bfloat16.

Rules:
1. The padding is of zeros, at the end of the gathered dimension only, and the indices are constant.
2. `inverse′` points removed features at the last kept one, which `kept` then hides; so a value that is
   not finite does not spread.
"""

import numpy as np
import onnx_ir as ir

from dispfx.deploy.onnx.patterns import constant, made_by, size_of


def replace_pads(graph: ir.Graph) -> int:
    """Rewrite the graph in place and return how many paddings are gone."""
    gathers = [node for node in graph if node.op_type == "Gather" and node.domain == ""]
    return sum(_replace(graph, node, number) for number, node in enumerate(gathers))


def _replace(graph: ir.Graph, gather: ir.Node, number: int) -> bool:
    pad = made_by(gather.inputs[0], "Pad")
    indices = constant(gather.inputs[1])
    result = gather.outputs[0]
    if pad is None or indices is None or indices.ndim != 1 or result.shape is None or result.dtype is None:
        return False
    rank, x = len(result.shape), pad.inputs[0]
    axis = gather.attributes["axis"].as_int() % rank
    kept = size_of(x, axis, rank)
    if x is None or kept is None or not _pads_the_end(pad, axis, rank):
        return False
    shape = [len(indices) if place == axis else 1 for place in range(rank)]
    hidden = _initializer(graph, f"dispfx_kept_{number}", (indices < kept).reshape(shape))
    inside = _initializer(graph, f"dispfx_inverse_{number}", np.minimum(indices, kept - 1))
    zero = _initializer(graph, f"dispfx_zero_{number}", np.zeros((), result.dtype.numpy()))
    full = ir.Value(name=f"{result.name}_unmasked", type=result.type, shape=result.shape)
    masked = ir.Value(name=f"{result.name}_masked", type=result.type, shape=result.shape)
    graph.insert_before(
        gather,
        [
            ir.node("Gather", [x, inside], attributes={"axis": axis}, outputs=[full]),
            ir.node("Where", [hidden, full, zero], outputs=[masked]),
        ],
    )
    ir.convenience.replace_all_uses_with(result, masked, replace_graph_outputs=True)
    return True


def _pads_the_end(pad: ir.Node, axis: int, rank: int) -> bool:
    amounts = constant(pad.inputs[1])
    value = constant(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else np.zeros(1)
    if amounts is None or value is None or (len(pad.inputs) > 3 and pad.inputs[3] is not None):
        return False
    mode = pad.attributes["mode"].as_string() if "mode" in pad.attributes else "constant"
    expected = [int(place == rank + axis) for place in range(2 * rank)]
    return mode == "constant" and amounts.reshape(-1).tolist() == expected and not value.any()


def _initializer(graph: ir.Graph, name: str, numbers: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(numbers, name=name))
    graph.register_initializer(value)
    return value
