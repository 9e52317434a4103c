"""Form the RotaryEmbedding operator where the exporter left its parts.

    x·cos + concat(−x[h:], x[:h])·sin    →    RotaryEmbedding(x, cos[:, :, :h], sin[:, :, :h])

The exporter does this for float32; with half precision a cast stands between the cosine and its use, and
it does not.

Rules:
1. cos and sin are `Unsqueeze(table, 1)` of tables (B, T, 2h) whose halves are the same value twice: a
   concatenation of one value with itself, through casts, cosines and multiplications by one number.
2. The tables are halved once, outside the layers, and have the batch of the tokens: the operator does
   not broadcast.
3. Anything else (a partial rotation, interleaved pairs) stays as it is.
"""

from dataclasses import dataclass, field

import onnx_ir as ir

from dispfx.deploy.onnx.patterns import constant, integer_constant, integers, like, made_by, size_of

_POINTWISE = ("Cast", "Cos", "Sin", "Mul")


@dataclass
class FormRotations:
    """Rewrite every rotation of one graph.

    Args:
        tables: halves of cosines and sines that were made already, by the whole table.
    """

    graph: ir.Graph
    tables: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def run(self) -> int:
        """Rewrite the graph in place and return how many rotations were formed."""
        formed = 0
        for node in [node for node in self.graph if node.op_type == "Add" and node.domain == ""]:
            formed += self._rewrite(node)
        return formed

    def _rewrite(self, add: ir.Node) -> bool:
        found = _rotation(add)
        if found is None:
            return False
        x, cosines, sines, half = found
        heads = size_of(x, 1, 4)
        halves = [self._half(table, half) for table in (cosines, sines)]
        result = add.outputs[0]
        rotated = ir.node(
            "RotaryEmbedding",
            [x, *halves],
            attributes={"interleaved": 0, "num_heads": heads},
            outputs=[ir.Value(name=f"{result.name}_rotated", type=result.type, shape=result.shape)],
        )
        self.graph.insert_before(add, rotated)
        ir.convenience.replace_all_uses_with(result, rotated.outputs[0])
        return True

    def _half(self, table: ir.Value, half: int) -> ir.Value:
        if table in self.tables:
            return self.tables[table]
        start, stop, axis = (
            integer_constant(self.graph, f"dispfx_{name}", [number])
            for name, number in (("zero", 0), (f"half_{half}", half), ("last", -1))
        )
        cut = like(table, f"{table.name}_half", [*list(table.shape or ())[:2], half])
        node = ir.node("Slice", [table, start, stop, axis], outputs=[cut])
        maker = table.producer()
        assert maker is not None
        self.graph.insert_after(maker, node)
        self.tables[table] = cut
        return cut


def _rotation(add: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value, int] | None:
    """Return x, the tables of cosines and sines, and h."""
    for one, other in ((0, 1), (1, 0)):
        plain, turned = made_by(add.inputs[one], "Mul"), made_by(add.inputs[other], "Mul")
        if plain is None or turned is None:
            continue
        for x, cosines in (plain.inputs, plain.inputs[::-1]):
            for swapped, sines in (turned.inputs, turned.inputs[::-1]):
                half = _swapped_half(swapped, x)
                tables = _table(cosines), _table(sines)
                if half is not None and tables[0] is not None and tables[1] is not None:
                    assert x is not None
                    return x, tables[0], tables[1], half
    return None


def _swapped_half(swapped: ir.Value | None, x: ir.Value | None) -> int | None:
    """Return h if `swapped` is concat(−x[h:], x[:h]) along the last dimension."""
    concat, size = made_by(swapped, "Concat"), size_of(x, 3, 4)
    if concat is None or size is None or len(concat.inputs) != 2 or size_of(x, 1, 4) is None:
        return None
    negated = made_by(concat.inputs[0], "Neg")
    half = size // 2
    if negated is None or concat.attributes["axis"].as_int() not in (-1, 3) or size % 2:
        return None
    second = _slice_of(negated.inputs[0], x)
    first = _slice_of(concat.inputs[1], x)
    if second is None or first is None:
        return None
    fits = first[0] == 0 and first[1] == half and second[0] == half and second[1] >= size
    return half if fits else None


def _slice_of(value: ir.Value | None, x: ir.Value | None) -> tuple[int, int] | None:
    """Return the bounds of a slice of the last dimension of `x`."""
    node = made_by(value, "Slice")
    if node is None or node.inputs[0] is not x or len(node.inputs) < 4:
        return None
    start, stop, axis = (integers(value) for value in node.inputs[1:4])
    step = integers(node.inputs[4]) if len(node.inputs) > 4 else (1,)
    if start is None or stop is None or axis not in ((3,), (-1,)) or step != (1,):
        return None
    return start[0], stop[0]


def _table(value: ir.Value | None) -> ir.Value | None:
    """Return the table (B, T, 2h) that an Unsqueeze takes, if its halves are equal."""
    node = made_by(value, "Unsqueeze")
    if node is None or integers(node.inputs[1]) != (1,):
        return None
    table = node.inputs[0]
    return table if _has_equal_halves(table) else None


def _has_equal_halves(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "Concat":
        return (
            node.attributes["axis"].as_int() in (-1, 2) and len(set(node.inputs)) == 1 == len(node.inputs) - 1
        )
    if node.op_type not in _POINTWISE:
        return False
    whole = [value for value in node.inputs if not _is_number(value)]
    return len(whole) == 1 and _has_equal_halves(whole[0])


def _is_number(value: ir.Value | None) -> bool:
    found = constant(value)
    return found is not None and found.size == 1
