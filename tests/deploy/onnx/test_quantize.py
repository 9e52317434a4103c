"""Weights of 4 and 8 bits, read number by number and run by ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from dispfx.deploy.onnx.dequantize import dequantized, rounding, with_float_products
from dispfx.deploy.onnx.files import load_model, save_model
from dispfx.deploy.onnx.quantize import BY_TEXT, key, left_float, quantized
from dispfx.quantization.weight_rounding import to_nearest

VOCABULARY, IDS = 11, np.array([[1, 10, 0], [4, 4, 7]])
# float32 sums in another order.
TOLERANCE = 1e-5


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=f"node_{output}", **attributes)


def written(path: Path, nodes: Sequence[onnx.NodeProto], held: dict[str, np.ndarray]) -> ir.Model:
    """Write a model from input_ids (B, T) to logits, and return it as read back."""
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", None])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, str(path))
    return load_model(path)


def decoder(tmp_path: Path, width: int = 40, inner: int = 27) -> ir.Model:
    """Return a model of an embedding, a product, and a head of its own."""
    nodes = [
        node("Gather", ["table", "input_ids"], "rows"),
        node("MatMul", ["rows", "up"], "wide"),
        node("Tanh", ["wide"], "bent"),
        node("MatMul", ["bent", "head"], "logits"),
    ]
    held = {
        "table": weights(VOCABULARY, width),
        "up": weights(width, inner, seed=1),
        "head": weights(inner, VOCABULARY, seed=2),
    }
    return written(tmp_path / "model.onnx", nodes, held)


def in_4_bits(model: ir.Model, name: str = "up") -> ir.Model:
    """Return the quantized model, where a text has rounded one product's weight (K, N)."""
    rows = np.ascontiguousarray(initializer(model, name).T)
    return quantized(model, {key(rows): to_nearest(torch.from_numpy(rows), BY_TEXT)})


def outputs(model: ir.Model, path: Path) -> np.ndarray:
    """Return what ONNX Runtime computes."""
    path.parent.mkdir(exist_ok=True)
    save_model(model, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input_ids": IDS})
    return np.asarray(logits)


def initializer(model: ir.Model, name: str) -> np.ndarray:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy()


def number_by_number(model: ir.Model, name: str, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the matrix (K, N) that packed values mean, one number at a time as the operator defines them."""
    data = initializer(model, f"{name}_Q{bits}")
    scales, zeros = initializer(model, f"{name}_scales"), initializer(model, f"{name}_zero_points")
    found = np.zeros(shape, np.float32)
    for k in range(shape[0]):
        group, place = divmod(k, 32)
        for n in range(shape[1]):
            if bits == 8:
                number, zero = int(data[n, group, place]), int(zeros.reshape(shape[1], -1)[n, group])
            else:
                number = int(data[n, group, place // 2]) >> (4 if place % 2 else 0) & 15
                zero = int(zeros.reshape(shape[1], -1)[n, group // 2]) >> (4 if group % 2 else 0) & 15
            found[k, n] = scales.reshape(shape[1], -1)[n, group] * (number - zero)
    return found


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [64, 70, 20])
def test_packed_numbers_mean_the_weights_also_at_odd_widths(tmp_path: Path, bits: int, width: int):
    """Rules 1 and 4."""
    model = decoder(tmp_path, width)
    small = in_4_bits(model) if bits == 4 else quantized(model)
    up = number_by_number(small, "up", bits, (width, 27))
    head = number_by_number(small, "head", 8, (27, VOCABULARY))
    scales, zeros = initializer(small, "table_scales"), initializer(small, "table_zero_points")
    numbers = initializer(small, "table_rows_Q8").astype(np.float32)
    table = np.stack([scales[:, k // 32] * (numbers[:, k] - zeros[:, k // 32]) for k in range(width)], 1)

    assert np.abs(up - weights(width, 27, seed=1)).max() < (0.4 if bits == 4 else 0.02)
    expected = np.tanh(table[IDS] @ up) @ head
    assert close(outputs(with_float_products(small), tmp_path / "exact" / "model.onnx"), expected)
    assert close(outputs(dequantized(small), tmp_path / "plain" / "model.onnx"), expected)
    # The model as it is written rounds inputs of products to 8 bits.
    rounded = outputs(small, tmp_path / "small" / "model.onnx")
    assert 0 < np.abs(rounded - expected).max() < 0.05 * np.abs(expected).max()


def test_only_what_a_text_has_rounded_gets_4_bits(tmp_path: Path):
    """Rule 2."""
    small = in_4_bits(decoder(tmp_path))

    bits = {at.outputs[0].name: at.attributes["bits"].as_int() for at in small.graph if at.domain}
    assert bits == {"rows": 8, "wide": 4, "logits": 8}


@pytest.mark.parametrize("width", [64, 40])
def test_a_tied_head_is_stored_once_if_groups_fill_a_row(tmp_path: Path, width: int):
    """Rule 3."""
    nodes = [
        node("Gather", ["table", "input_ids"], "rows"),
        node("Tanh", ["rows"], "bent"),
        node("Transpose", ["table"], "turned", perm=[1, 0]),
        node("MatMul", ["bent", "turned"], "logits"),
    ]
    model = written(tmp_path / "model.onnx", nodes, {"table": weights(VOCABULARY, width)})
    small = quantized(model)

    packed = [name for name in small.graph.initializers if name.endswith("_Q8")]
    assert len(packed) == (1 if width == 64 else 2)
    assert "table" not in small.graph.initializers
    table = number_by_number(small, "table", 8, (width, VOCABULARY)).T
    expected = np.tanh(table[IDS]) @ table.T
    assert close(outputs(with_float_products(small), tmp_path / "exact" / "model.onnx"), expected)
    assert rounding(small, model).steps <= 0.501


def test_a_product_with_a_bias_and_a_transposed_weight(tmp_path: Path):
    nodes = [
        node("Gather", ["table", "input_ids"], "rows"),
        node("Reshape", ["rows", "flat"], "matrix"),
        node("Gemm", ["matrix", "up", "bias"], "wide", transB=1),
        node("Reshape", ["wide", "three"], "logits"),
    ]
    bias = weights(27, seed=3)
    held = {
        "table": weights(VOCABULARY, 40),
        "up": weights(27, 40, seed=1),
        "bias": bias,
        "flat": np.array([-1, 40]),
        "three": np.array([2, 3, 27]),
    }
    model = written(tmp_path / "model.onnx", nodes, held)
    small = quantized(model)

    # It gives the logits, through a Reshape.
    up = number_by_number(small, "up", 8, (40, 27))
    rows = outputs(with_float_products(small), tmp_path / "exact" / "model.onnx") - bias
    table = initializer(dequantized(small), "rows_weight")
    assert close(rows, table[IDS] @ up)
    assert rounding(small, model).steps <= 0.501


def test_a_scaled_product_a_stack_of_weights_and_a_position_table_stay_float(tmp_path: Path):
    """Rules 1 and 2."""
    nodes = [
        node("Gather", ["table", "input_ids"], "rows"),
        node("Gather", ["positions", "where"], "places"),
        node("Add", ["rows", "places"], "both"),
        node("Unsqueeze", ["both", "one"], "deep"),
        node("MatMul", ["deep", "experts"], "each"),
        node("Reshape", ["each", "flat"], "matrix"),
        node("Gemm", ["matrix", "scaled"], "half", alpha=0.5),
        node("Reshape", ["half", "back"], "wide"),
        node("MatMul", ["wide", "head"], "logits"),
    ]
    held = {
        "table": weights(VOCABULARY, 40),
        "positions": weights(5, 40),
        "where": np.array([0, 1, 2]),
        "one": np.array([1]),
        "experts": weights(1, 3, 40, 8)[0],
        "flat": np.array([-1, 8]),
        "scaled": weights(8, 8),
        "back": np.array([2, -1, 8]),
        "head": weights(8, VOCABULARY),
    }
    model = written(tmp_path / "model.onnx", nodes, held)

    small = quantized(model)

    assert sorted(left_float(small, model)) == ["experts", "positions", "scaled"]
    assert rounding(small, model).steps <= 0.501


def test_a_column_of_zeros_stays_zero(tmp_path: Path):
    model = decoder(tmp_path)
    up = weights(40, 27, seed=1)
    up[:, 3] = 0
    model.graph.initializers["up"].const_value = ir.tensor(up, name="up")
    small = in_4_bits(model)

    assert not number_by_number(small, "up", 4, (40, 27))[:, 3].any()
    assert rounding(small, model).steps <= 0.501


def test_another_number_weight_or_operator_is_found(tmp_path: Path):
    model = decoder(tmp_path)
    assert rounding(in_4_bits(model), model).steps <= 0.501

    swapped = in_4_bits(model)
    assert 0.05 < rounding(swapped, model).change < 0.15
    data = initializer(swapped, "up_Q4").copy()
    swapped.graph.initializers["up_Q4"].const_value = ir.tensor(data >> 4 | data << 4, name="up_Q4")
    assert rounding(swapped, model).change > 1

    for bits, find in ((4, lambda far: far.change), (8, lambda far: far.steps)):
        spoilt = in_4_bits(model) if bits == 4 else quantized(model)
        scales = initializer(spoilt, "up_scales").copy()
        scales.flat[0] = np.nan
        spoilt.graph.initializers["up_scales"].const_value = ir.tensor(scales, name="up_scales")
        assert np.isnan(find(rounding(spoilt, model)))

    bent = in_4_bits(model)
    next(at for at in bent.graph if at.op_type == "Tanh").op_type = "Sigmoid"
    assert rounding(bent, model).steps == float("inf")

    other = decoder(tmp_path)
    other.graph.initializers["head"].const_value = ir.tensor(weights(27, VOCABULARY, seed=9), name="head")
    assert rounding(quantized(model), other).steps > 1


@pytest.mark.parametrize("dtype", [np.float16, ir.DataType.BFLOAT16.numpy()], ids=["float16", "bfloat16"])
def test_half_precision_becomes_float32_around_the_weights(tmp_path: Path, dtype: Any):
    table, head = (weights(VOCABULARY, 40).astype(dtype), weights(40, VOCABULARY, seed=2).astype(dtype))
    model = written(
        tmp_path / "model.onnx",
        [node("Gather", ["table", "input_ids"], "rows"), node("MatMul", ["rows", "head"], "logits")],
        {"table": weights(VOCABULARY, 40), "head": weights(40, VOCABULARY, seed=2)},
    )
    for name, value in (("table", table), ("head", head)):
        model.graph.initializers[name].const_value = ir.tensor(value, name=name)
    small = quantized(model)

    expected = table.astype(np.float32)[IDS] @ head.astype(np.float32)
    found = outputs(with_float_products(small), tmp_path / "exact" / "model.onnx")
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_that_of_onnx_runtimes_own_tool(tmp_path: Path, bits: int):
    from onnxruntime.quantization import matmul_nbits_quantizer as tool

    model = decoder(tmp_path, 64)
    small = in_4_bits(model) if bits == 4 else quantized(model)
    config = tool.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=False, bits=bits)
    expected = tool.DefaultWeightOnlyQuantizer(config).qbits_block_quant(initializer(model, "up"))

    found = [initializer(small, f"up_{name}") for name in (f"Q{bits}", "scales", "zero_points")]
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one.ravel(), np.ravel(other), rtol=1e-6)
