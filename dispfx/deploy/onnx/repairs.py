"""Repairs on the ONNX graph that the exporter gives back, before it is written."""

import onnx_ir as ir


def expand_rotary_tables(graph: ir.Graph) -> None:
    """Give the tables of every RotaryEmbedding the batch of its input.

        cos (1, T, H/2) → RotaryEmbedding(x, cos, sin)
        cos (1, T, H/2) → Expand(batch of input_ids, 1, 1) → RotaryEmbedding(x, cos, sin)

    The exporter forms the operator (from opset 23 on) out of products that broadcast over the batch.  The
    operator itself does not broadcast: its tables are (batch, sequence, H/2), and ONNX Runtime refuses
    any batch but one.
    """
    rotations = [node for node in graph if node.op_type == "RotaryEmbedding" and node.domain == ""]
    if not rotations:
        return
    batch_shape = _batch_shape(graph)
    expanded: dict[ir.Value, ir.Value] = {}
    for node in rotations:
        for position in (1, 2):
            table = node.inputs[position]
            if table is None or (table.shape is not None and len(table.shape) != 3):
                continue
            if table not in expanded:
                name = f"{table.name}_of_batch"
                expand = ir.node("Expand", [table, batch_shape], outputs=[_like(table, name)])
                graph.insert_before(node, expand)
                expanded[table] = expand.outputs[0]
            node.replace_input_with(position, expanded[table])


def _batch_shape(graph: ir.Graph) -> ir.Value:
    """Return the shape (batch, 1, 1) as a value computed at the top of the graph."""
    ones = ir.Value(name="dispfx_ones", const_value=ir.tensor([1, 1], dtype=ir.DataType.INT64))
    graph.register_initializer(ones)
    batch = ir.node("Shape", [graph.inputs[0]], attributes={"start": 0, "end": 1})
    shape = ir.node("Concat", [batch.outputs[0], ones], attributes={"axis": 0})
    batch.outputs[0].name, shape.outputs[0].name = "dispfx_batch", "dispfx_batch_shape"
    graph.insert_before(graph[0], [batch, shape])
    return shape.outputs[0]


def _like(table: ir.Value, name: str) -> ir.Value:
    shape = None if table.shape is None else ir.Shape([ir.SymbolicDim("batch"), *list(table.shape)[1:]])
    return ir.Value(name=name, type=table.type, shape=shape)


def widen_scatter_indices(graph: ir.Graph) -> None:
    """Cast the indices of every ScatterND to int64, the only type the operator takes.

        ScatterND(data, int32 indices, updates) → ScatterND(data, Cast(indices), updates)

    torch adds into a tensor at int32 indices too, and the exporter passes them on as they are.
    """
    for node in [node for node in graph if node.op_type == "ScatterND" and node.domain == ""]:
        indices = node.inputs[1]
        if indices is None or indices.dtype in (None, ir.DataType.INT64):
            continue
        wide = ir.Value(
            name=f"{node.name}_indices", type=ir.TensorType(ir.DataType.INT64), shape=indices.shape
        )
        to = {"to": int(ir.DataType.INT64)}
        graph.insert_before(node, ir.node("Cast", [indices], attributes=to, outputs=[wide]))
        node.replace_input_with(1, wide)


def type_norms(graph: ir.Graph) -> None:
    """Let every RMSNormalization compute in the type of its scale.

        RMSNormalization(half, float scale) → float
            →   RMSNormalization(Cast(half, float), float scale) → float

    The exporter forms the operator over the cast in front of it.  ONNX says that the result has the type of
    the scale, and onnx's own check wants that of the operand: both hold where the two are one.
    """
    for node in [node for node in graph if node.op_type == "RMSNormalization" and node.domain == ""]:
        x, scale = node.inputs[0], node.inputs[1]
        if x is None or scale is None or scale.dtype is None or x.dtype in (None, scale.dtype):
            continue
        wide = ir.Value(name=f"{x.name}_for_{node.name}", type=ir.TensorType(scale.dtype), shape=x.shape)
        to = {"to": int(scale.dtype)}
        graph.insert_before(node, ir.node("Cast", [x], attributes=to, outputs=[wide]))
        node.replace_input_with(0, wide)


def forget_sources(model: ir.Model) -> None:
    """Drop the notes of the exporter, which hold stack traces with the paths of this machine."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
