"""What a translator must know of a graph does not grow with its depth."""

import torch
from torch import fx

from dispfx.capturing.module_capture import capture
from dispfx.deploy.onnx.one_of_each import one_of_each
from tests.plain_decoders import FORMS, build

CPU = torch.device("cpu")


def graph_of(layers: int) -> fx.GraphModule:
    return capture(build(FORMS["pre-norm"], layers=layers)).graph_module


def kinds(module: fx.GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


def test_a_deeper_decoder_has_the_same_operations():
    few, many = graph_of(1), graph_of(4)
    short, long = one_of_each(few, CPU), one_of_each(many, CPU)

    assert len(many.graph.nodes) > 2 * len(few.graph.nodes)
    assert len(long.graph.nodes) == len(short.graph.nodes) < len(few.graph.nodes)
    assert kinds(long) == kinds(many)


def test_shapes_are_those_of_the_graph_and_nothing_is_unused():
    module = graph_of(2)
    twin = one_of_each(module, CPU)
    noted = [node.meta["val"].shape for node in twin.graph.output_node().all_input_nodes]
    found = twin(torch.zeros(3, 13, dtype=torch.int64))

    assert [[int(size) for size in shape] for shape in noted] == [list(value.shape) for value in found]
    assert all(node.users or node.op == "placeholder" for node in list(twin.graph.nodes)[:-1])


def test_parameters_without_values_get_room_and_others_are_shared():
    module = graph_of(1)
    weight = module.get_parameter("embedding.weight")
    assert one_of_each(module, CPU).get_parameter("embedding.weight") is weight
    module.to("meta")
    assert one_of_each(module, CPU).get_parameter("embedding.weight").device == CPU
