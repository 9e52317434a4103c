"""Store the weights of products in 4 or 8 bits, in groups of 32.

    y = MatMul(x, W)            →    y = MatMulNBits(x, W_Q4, W_scales, W_zero_points)
    y = Gemm(x, W, bias)        →    p = MatMulNBits(x, W_Q4, …); y = Add(p, bias)
    y = Gather(E, input_ids)    →    y = GatherBlockQuantized(E_Q8, input_ids, E_scales, E_zero_points)

Every group of 32 numbers along the input dimension has a scale and a zero point.

Rules:
1. A weight of a product is quantized if it is a float32 matrix, or the Transpose of one.  Its width need not
   be a multiple of 32: the last group is filled up with zeros, which take no part in the product.
2. A product gets 4 bits if its weight is that of a layer that was rounded by a text.  The token embedding,
   the head and other products get 8 bits, rounded to nearest.  Position tables and everything else stay
   float32.
3. A head with the numbers of the embedding is stored once.  The embedding then gives groups, which a Reshape
   joins.
4. Products are marked for integer arithmetic (`accuracy_level` 4): the kernel also rounds the inputs, to 8
   bits per group.  Float32 products of 8-bit weights are 8 times slower than those of float32 weights.

Shape legend: K input width, N output width, V vocabulary, D residual width, G groups of a row.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch

from dispfx.deploy.onnx.twin import float32_twin
from dispfx.quantization.weight_rounding import Grid, Rounded, to_nearest

DOMAIN = "com.microsoft"
GROUP = 32
# Of the layers that a text is read for (rule 2).
BY_TEXT = Grid(4, GROUP)
_NEAREST = Grid(8, GROUP)
_INTEGER_PRODUCTS = 4
_PRODUCTS = ("MatMul", "Gemm")
_PLAIN_GEMM = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}
# End of the name of a product before its bias is added.
PRODUCT = "_product"


@dataclass(frozen=True)
class Weight:
    """The weight of a product: an initializer (K, N), or (N, K) if it is transposed first."""

    value: ir.Value
    transposed: bool = False

    @property
    def numbers(self) -> np.ndarray:
        """The matrix (K, N) of the product."""
        numbers = _numbers(self.value)
        return np.ascontiguousarray(numbers.T if self.transposed else numbers)


@dataclass(frozen=True)
class Packed:
    """A quantized matrix (K, N) as values of the graph.

    Args:
        data: (N, G, bytes of a group) uint8.
        scales: (N, G).
        zero_points: (N, G) uint8, two in a byte for 4 bits.
        shape: K and N.
        bits: of a number.
    """

    data: ir.Value
    scales: ir.Value
    zero_points: ir.Value
    shape: tuple[int, int]
    bits: int


def quantized(model: ir.Model, by_text: Mapping[str, Rounded] | None = None) -> ir.Model:
    """Return a copy of a model with smaller weights; half precision becomes float32.

    Args:
        by_text: weights that were rounded by a text, by the `key` of what they were; all other weights get 8.
    """
    twin = float32_twin(model)
    _Rewriting(twin, by_text or {}).run()
    return twin


def key(weight: np.ndarray) -> str:
    """Return what a weight (N, K) float32 is known by."""
    return hashlib.sha256(np.ascontiguousarray(weight).tobytes()).hexdigest() + str(weight.shape)


def left_float(model: ir.Model, original: ir.Model) -> list[str]:
    """Return the weights of the original with several rows and columns that are unchanged in the model."""
    return [
        name
        for name, value in original.graph.initializers.items()
        if name in model.graph.initializers and _is_weight(value)
    ]


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype.is_floating_point()
        and sum(size > 1 for size in tensor.shape.numpy()) > 1
    )


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Return the shape of a weight."""
    assert value.const_value is not None
    return tuple(value.const_value.shape.numpy())


class _Rewriting:
    """One model being rewritten; matrices that are already packed are found by weight and direction."""

    def __init__(self, model: ir.Model, by_text: Mapping[str, Rounded]):
        self._model, self._graph, self._by_text = model, model.graph, by_text
        self._packed: dict[tuple[str, bool], Packed] = {}
        self._head: Packed | None = None

    def run(self) -> None:
        head = head_of(self._graph)
        for node in [node for node in self._graph if weight_of(node) is not None]:
            packed = self._replace_product(node)
            self._head = packed if node is head else self._head
        for node in [node for node in self._graph if _is_embedding(node)]:
            self._replace_embedding(node)
        if self._packed:
            self._model.opset_imports[DOMAIN] = 1
        common.RemoveUnusedNodesPass()(self._model)
        self._graph.sort()

    def _replace_product(self, node: ir.Node) -> Packed:
        weight, output = weight_of(node), node.outputs[0]
        assert weight is not None
        packed = self._pack(weight)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        inner = output.name if bias is None else f"{output.name}{PRODUCT}"
        product = _like(output, inner)
        width, columns = packed.shape
        made = ir.node(
            "MatMulNBits",
            [node.inputs[0], packed.data, packed.scales, packed.zero_points],
            {
                "K": width,
                "N": columns,
                "bits": packed.bits,
                "block_size": GROUP,
                "accuracy_level": _INTEGER_PRODUCTS,
            },
            domain=DOMAIN,
            outputs=[product],
            name=f"{node.name}_Q{packed.bits}",
        )
        added = None
        if bias is not None:
            added = ir.node("Add", [product, bias], outputs=[_like(output, output.name)], name=node.name)
        self._put(node, [made] if added is None else [made, added])
        return packed

    def _replace_embedding(self, node: ir.Node) -> None:
        table, ids, output = node.inputs[0], node.inputs[1], node.outputs[0]
        assert table is not None and ids is not None
        width = shape_of(table)[1]
        packed = self._pack(Weight(table, transposed=True))
        shared = width % GROUP == 0 and self._head is not None and self._is_head(packed)
        if shared:
            assert self._head is not None
            self._put(node, self._shared(node, self._head, width))
            return
        data = ir.Value(name=f"{table.name}_rows_Q{packed.bits}")
        # Rows without the zeros that fill up the last group.
        self._store(data, _numbers(packed.data).reshape(packed.shape[1], -1)[:, :width])
        made = _gather(node, [data, ids, packed.scales, packed.zero_points], 1, _like(output, output.name))
        self._put(node, [made])

    def _is_head(self, packed: Packed) -> bool:
        assert self._head is not None
        pairs = zip(_values(packed), _values(self._head), strict=True)
        return all(np.array_equal(_numbers(one), _numbers(other)) for one, other in pairs)

    def _shared(self, node: ir.Node, head: Packed, width: int) -> list[ir.Node]:
        """Look up the rows of the head: groups of an id, and a Reshape that joins them (rule 3)."""
        output = node.outputs[0]
        axis, rows = ir.Value(name=f"{output.name}_axis"), ir.Value(name=f"{output.name}_shape")
        self._store(axis, np.array([-1], np.int64))
        self._store(rows, np.array([0, 0, width], np.int64))
        deeper = [
            ir.node("Unsqueeze", [value, axis], name=f"{value.name}_by_group", outputs=[_deeper(value)])
            for value in (head.scales, head.zero_points)
        ]
        groups = ir.Value(name=f"{output.name}_groups", type=output.type)
        inputs = [head.data, node.inputs[1], *(one.outputs[0] for one in deeper)]
        made = _gather(node, inputs, 2, groups)
        joined = ir.node(
            "Reshape", [groups, rows], outputs=[_like(output, output.name)], name=f"{node.name}_joined"
        )
        return [*deeper, made, joined]

    def _pack(self, weight: "Weight") -> Packed:
        name = str(weight.value.name)
        place = (name, weight.transposed)
        if place not in self._packed:
            rows = np.ascontiguousarray(weight.numbers.T)
            by_text = self._rounded(rows)
            grid = _NEAREST if by_text is None else BY_TEXT
            found = to_nearest(torch.from_numpy(rows), _NEAREST) if by_text is None else by_text
            names = (f"{name}_Q{grid.bits}", f"{name}_scales", f"{name}_zero_points")
            if any(name in self._graph.initializers for name in names):
                # The same weight, packed in the other direction.
                names = tuple(f"{name}_again" for name in names)
            data, scales, zeros = (ir.Value(name=name) for name in names)
            for value, numbers in zip((data, scales, zeros), _packed(found, grid.bits), strict=True):
                self._store(value, numbers)
            self._packed[place] = Packed(data, scales, zeros, (rows.shape[1], rows.shape[0]), grid.bits)
        return self._packed[place]

    def _rounded(self, rows: np.ndarray) -> Rounded | None:
        """Return a weight (N, K) as a text has rounded it; those of writes end in outputs of zeros."""
        used = int(np.flatnonzero(rows.any(axis=1)).max(initial=-1)) + 1
        found = self._by_text.get(key(rows[:used]))
        return None if found is None else found.with_zeros(len(rows) - used)

    def _store(self, value: ir.Value, numbers: np.ndarray) -> None:
        tensor = ir.tensor(np.ascontiguousarray(numbers), name=value.name)
        value.const_value, value.shape = tensor, ir.Shape(numbers.shape)
        value.type = ir.TensorType(tensor.dtype)
        self._graph.register_initializer(value)

    def _put(self, node: ir.Node, made: list[ir.Node]) -> None:
        """Put nodes in the place of one; the last one's output takes over its name and its uses."""
        ir.convenience.replace_nodes_and_values(
            self._graph, node, [node], made, node.outputs, made[-1].outputs
        )


def head_of(graph: ir.Graph) -> ir.Node | None:
    """Return the product that gives the logits, through operations on its output."""
    at = graph.outputs[0].producer()
    while at is not None and weight_of(at) is None:
        above = [value.producer() for value in at.inputs if value is not None]
        at = next((node for node in above if node is not None), None)
    return at


def weight_of(node: ir.Node) -> Weight | None:
    """Return the matrix of a product with a weight (rule 1)."""
    if node.domain != "" or node.op_type not in _PRODUCTS:
        return None
    value, transposed = node.inputs[1], False
    if node.op_type == "Gemm":
        given = {**_PLAIN_GEMM, **{name: attribute.value for name, attribute in node.attributes.items()}}
        if {**given, "transB": 0} != _PLAIN_GEMM:
            return None
        transposed = bool(given["transB"])
    turned = None if value is None else value.producer()
    if turned is not None and turned.op_type == "Transpose":
        value, transposed = turned.inputs[0], not transposed
    return Weight(value, transposed) if value is not None and _is_matrix(value) else None


def _is_embedding(node: ir.Node) -> bool:
    """Whether a node looks up the rows of a matrix by the token ids (rule 2)."""
    if node.domain != "" or node.op_type != "Gather":
        return False
    table, ids = node.inputs[0], node.inputs[1]
    axis = node.attributes.get("axis")
    first = axis is None or axis.as_int() == 0
    return first and ids is not None and ids.name == "input_ids" and table is not None and _is_matrix(table)


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and (len(tensor.shape) == 2)
    )


def _gather(node: ir.Node, inputs: list[Any], axis: int, output: ir.Value) -> ir.Node:
    return ir.node(
        "GatherBlockQuantized",
        inputs,
        {"gather_axis": 0, "quantize_axis": axis, "block_size": GROUP, "bits": _NEAREST.bits},
        domain=DOMAIN,
        outputs=[output],
        name=f"{node.name}_Q{_NEAREST.bits}",
    )


def _like(value: ir.Value, name: str | None) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=value.shape)


def _deeper(value: ir.Value) -> ir.Value:
    return ir.Value(name=f"{value.name}_by_group", type=value.type, shape=ir.Shape((*shape_of(value), 1)))


def _values(packed: Packed) -> tuple[ir.Value, ...]:
    return packed.data, packed.scales, packed.zero_points


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _packed(found: Rounded, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return data (N, G, bytes of a group), scales (N, G) and zero points (N, bytes of G) of a weight."""
    codes = found.codes.cpu().numpy()
    full = np.pad(codes, ((0, 0), (0, -codes.shape[1] % GROUP))).reshape(len(codes), -1, GROUP)
    zeros = found.zeros.cpu().numpy().astype(np.uint8)
    return _in_bytes(full, bits), found.scales.cpu().numpy(), _in_bytes(zeros, bits)


def _in_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes along the last axis in bytes; a byte of 4-bit codes holds the first in its low half."""
    if bits == 8:
        return codes
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return even[..., ::2] | even[..., 1::2] << 4
