"""Build what every Attention adds to its scores once, outside the layers, and say what is causal.

    index(mask, rows, columns) & (key ≤ query) → Attention(…, bool)
        →   Where(mask & (key ≤ query), 0, lowest) → Attention(…, number, causal)

Rules:
1. Gathering a padding mask at every row and every column is the mask itself, with two dimensions more:
   `GatherND(m, (Range(rows), Range(columns)))` becomes `Unsqueeze(m, [1, 2])`.
2. `Range(0, n) + start` with one number `start` is `Range(start, start + n)`, which a GPU makes from
   numbers on the CPU; the sum would copy `start` to it.
3. A mask is a conjunction.  Where one part of it is `key ≤ query`, and the cache is the operator's own,
   Attention is told that it is causal: it then leaves out what the mask would hide.
4. Where nothing is padded, and the mask is nothing but causality and padding, there is no mask.
5. A boolean mask that Attention reads becomes the number that it stands for, in the type of the scores:
   0, or the lowest that the fused kernels can take.  Otherwise each layer converts it again.
"""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from dispfx.deploy.onnx.patterns import constant, integer_constant, integers, like, made_by

# exp2 in the fused kernels multiplies scores by log2(e): the lowest float32 would become infinite.
_LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -1e30, ir.DataType.FLOAT: -1e30}
_PADDING = "attention_mask"
_SPREADS = ("Expand", "Unsqueeze", "Identity", "Cast")


def legalize_masks(graph: ir.Graph, *, padding: bool = True) -> None:
    """Rewrite the masks of the graph in place.

    Args:
        padding: whether texts may be padded; without, every text must be whole.
    """
    for node in _nodes(graph, "GatherND"):
        _simplify_lookup(graph, node)
    for node in _nodes(graph, "Add"):
        _start_range(graph, node)
    biases: dict[ir.Value, ir.Value] = {}
    for node in _nodes(graph, "Attention"):
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        if mask is None or mask.dtype != ir.DataType.BOOL:
            continue
        if len(node.inputs) == 6 and "causal" in (kinds := set(map(_kind, _conjuncts(mask)))):
            node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
            if not padding and kinds <= {"causal", "padding", "true"}:
                node.replace_input_with(3, None)
                continue
        _give_number(graph, node, mask, biases)


def _nodes(graph: ir.Graph, operator: str) -> list[ir.Node]:
    return [node for node in graph if node.op_type == operator and node.domain == ""]


def _conjuncts(mask: ir.Value) -> Iterator[ir.Value]:
    """Yield the operands of the conjunction that a mask consists of (rule 3)."""
    node = mask.producer()
    if node is not None and node.op_type == "And" and node.domain == "":
        for value in node.inputs:
            assert value is not None
            yield from _conjuncts(value)
    elif node is not None and node.op_type in ("Expand", "Identity") and node.inputs[0] is not None:
        yield from _conjuncts(node.inputs[0])
    else:
        yield mask


def _kind(value: ir.Value) -> str:
    """Return what one part of a mask says: causal, padding, true (nothing), or other."""
    numbers = constant(value)
    if numbers is not None:
        return "true" if numbers.all() else "other"
    comparison = made_by(value, "LessOrEqual")
    if comparison is not None:
        keys, queries = comparison.inputs
        return (
            "causal" if _counts(keys, 3, from_past=False) and _counts(queries, 2, from_past=True) else "other"
        )
    while (node := value.producer()) is not None and node.op_type in _SPREADS and node.inputs[0] is not None:
        value = node.inputs[0]
    return "padding" if value.name == _PADDING and value.is_graph_input() else "other"


def _counts(value: ir.Value | None, place: int, *, from_past: bool) -> bool:
    """Whether a value (1, 1, T, 1) or (1, 1, 1, P + T) numbers the new tokens, or all tokens, at `place`."""
    if value is None or value.shape is None or len(value.shape) != 4:
        return False
    if any(size != 1 for at, size in enumerate(value.shape) if at != place):
        return False
    while (node := made_by(value, "Unsqueeze")) is not None:
        value = node.inputs[0]
    numbers = made_by(value, "Range")
    if numbers is None or integers(numbers.inputs[2]) != (1,):
        return False
    starts_at_zero = integers(numbers.inputs[0]) == (0,)
    return _is_past(numbers.inputs[0]) if from_past else starts_at_zero


def _is_past(value: ir.Value | None) -> bool:
    """Whether a number is how many tokens are cached: the third size of a cache that goes in."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Squeeze", "Reshape", "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Shape" or node.inputs[0] is None:
        return False
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else 4
    name = node.inputs[0].name or ""
    return (start, end) == (2, 3) and name.startswith("past_key_values.")


def _give_number(graph: ir.Graph, node: ir.Node, mask: ir.Value, biases: dict[ir.Value, ir.Value]) -> None:
    """Apply rule 5."""
    query = node.inputs[0]
    if query is None or query.dtype not in _LOWEST:
        return
    if mask not in biases:
        biases[mask] = _bias(graph, mask, query)
    node.replace_input_with(3, biases[mask])


def _bias(graph: ir.Graph, mask: ir.Value, scores: ir.Value) -> ir.Value:
    dtype = scores.dtype
    assert dtype is not None
    zero, lowest = (
        _number(graph, f"dispfx_{name}_{dtype.name.lower()}", number, dtype)
        for name, number in (("keep", 0.0), ("drop", _LOWEST[dtype]))
    )
    bias = ir.Value(name=f"{mask.name}_bias", type=scores.type, shape=mask.shape)
    _insert_after(graph, mask, ir.node("Where", [mask, zero, lowest], outputs=[bias]))
    return bias


def _number(graph: ir.Graph, name: str, number: float, dtype: ir.DataType) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(number, dtype=dtype.numpy()), dtype=dtype, name=name)
        graph.register_initializer(ir.Value(name=name, const_value=tensor))
    return graph.initializers[name]


def _insert_after(graph: ir.Graph, value: ir.Value, node: ir.Node) -> None:
    maker = value.producer()
    if maker is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(maker, node)


def _simplify_lookup(graph: ir.Graph, gather: ir.Node) -> None:
    """Apply rule 1."""
    mask, indices = gather.inputs
    concat = made_by(indices, "Concat")
    if mask is None or concat is None or mask.shape is None:
        return
    if len(mask.shape) != 2 or len(concat.inputs) != 2:
        return
    # Rows stand in the first of four dimensions and columns in the last.
    if not _whole_range(concat.inputs[0], 0) or not _whole_range(concat.inputs[1], 3):
        return
    result = gather.outputs[0]
    axes = integer_constant(graph, "dispfx_middle", [1, 2])
    wide = like(mask, f"{result.name}_of_all", [mask.shape[0], 1, 1, mask.shape[1]])
    graph.insert_before(gather, ir.node("Unsqueeze", [mask, axes], outputs=[wide]))
    ir.convenience.replace_all_uses_with(result, wide)


def _whole_range(value: ir.Value | None, place: int) -> bool:
    """Whether an index for GatherND is a Range from 0 that varies at one of four dimensions."""
    unsqueeze = made_by(value, "Unsqueeze")
    expand = made_by(unsqueeze.inputs[0], "Expand") if unsqueeze else None
    spread = expand.inputs[0] if expand else None
    if spread is None or spread.shape is None or len(spread.shape) != 4:
        return False
    varies = [at for at, size in enumerate(spread.shape) if size != 1]
    while (node := made_by(spread, "Unsqueeze")) is not None:
        spread = node.inputs[0]
    numbers = made_by(spread, "Range")
    return numbers is not None and varies == [place] and integers(numbers.inputs[0]) == (0,)


def _start_range(graph: ir.Graph, add: ir.Node) -> None:
    """Apply rule 2."""
    for numbers, start in (add.inputs, add.inputs[::-1]):
        made = made_by(numbers, "Range")
        if made is None or start is None or start.shape is None or len(start.shape) != 0:
            continue
        zero, count, step = made.inputs
        if integers(zero) != (0,) or integers(step) != (1,) or start.dtype != ir.DataType.INT64:
            continue
        result = add.outputs[0]
        end = ir.Value(name=f"{result.name}_end", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        moved = ir.Value(name=f"{result.name}_range", type=result.type, shape=result.shape)
        graph.insert_before(
            add,
            [
                ir.node("Add", [start, count], outputs=[end]),
                ir.node("Range", [start, end, step], outputs=[moved]),
            ],
        )
        ir.convenience.replace_all_uses_with(result, moved)
        return
