"""The float32 twin of a bfloat16 model: the same graph up to types."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from dispfx.deploy.onnx.twin import differences_beyond_types, float32_twin
from tests.deploy.onnx.cached_models import exported


@pytest.fixture(scope="module")
def model() -> ir.Model:
    return exported("llama", torch.bfloat16).model


def test_nothing_is_bfloat16_in_the_twin_and_the_model_keeps_its_types(model: ir.Model):
    twin = float32_twin(model)

    def types(of: ir.Model) -> set[ir.DataType | None]:
        graph = of.graph
        values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
        casts = [node.attributes["to"].as_int() for node in graph if node.op_type == "Cast"]
        made = [output for node in graph for output in node.outputs]
        return {value.dtype for value in [*values, *made]} | {ir.DataType(number) for number in casts}

    assert ir.DataType.BFLOAT16 in types(model)
    assert ir.DataType.BFLOAT16 not in types(twin)


def test_the_twin_differs_in_nothing_but_types(model: ir.Model):
    assert differences_beyond_types(model, float32_twin(model)) == []


def _other_operator(graph: ir.Graph) -> None:
    next(node for node in graph if node.op_type == "Sigmoid").op_type = "Tanh"


def _other_wiring(graph: ir.Graph) -> None:
    node = next(node for node in graph if node.op_type == "Add" and len(set(node.inputs)) == 2)
    node.replace_input_with(0, node.inputs[1])


def _other_attribute(graph: ir.Graph) -> None:
    node = next(node for node in graph if node.op_type == "Attention")
    node.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", 1)


def _other_weight(graph: ir.Graph) -> None:
    value = max(graph.initializers.values(), key=lambda value: value.const_value.size)  # type: ignore[union-attr]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.01), name=value.name)


def _one_node_less(graph: ir.Graph) -> None:
    graph.remove(next(node for node in reversed(list(graph)) if node.op_type == "MatMul"))


@pytest.mark.parametrize(
    "change", [_other_operator, _other_wiring, _other_attribute, _other_weight, _one_node_less]
)
def test_any_other_difference_is_seen(model: ir.Model, change):
    twin = float32_twin(model)
    change(twin.graph)

    assert differences_beyond_types(model, twin)
