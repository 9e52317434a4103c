"""A rewritten graph becomes an exported program again without being traced again."""

import pytest
import torch
from torch import Tensor, nn

from dispfx.deploy.onnx.lifting import lifted
from dispfx.errors import PassError
from dispfx.ir.cached_inputs import CachedShape, cache_tensors, sample_inputs
from tests.deploy.onnx.cached_models import lowered
from tests.programs import relative_error
from tests.tiny_transformers import VOCABULARY

TRACED = (3, 13, 34)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "phi", "qwen3", "mixtral")]


class Shapes(torch.fx.Interpreter):
    """Notes the shape that every value has."""

    def __init__(self, module: torch.fx.GraphModule):
        super().__init__(module)
        self.found: dict[str, list[int]] = {}

    def run_node(self, n: torch.fx.Node):
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found[n.name] = list(value.shape)
        return value


def hint(size: int | torch.SymInt) -> int:
    found = size if isinstance(size, int) else size.node.hint
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", *SLOW])
def test_every_value_of_a_lowered_graph_says_the_shape_that_it_has(name: str):
    program = lowered(name)
    inputs = sample_inputs(
        cache_tensors(program.graph), CachedShape(*TRACED), VOCABULARY, torch.device("cpu")
    )
    shapes = Shapes(program.graph_module)
    with torch.no_grad():
        shapes.run(*inputs)

    noted = {node.name: node.meta.get("val") for node in program.graph.nodes}
    assert len(shapes.found) > 50
    for value, shape in shapes.found.items():
        of_value = noted[value]
        assert isinstance(of_value, Tensor), value
        assert [hint(size) for size in of_value.shape] == shape, value


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_lifted_graph_computes_what_the_graph_computes_at_another_shape(name: str):
    program = lowered(name)
    exported = lifted(program.graph_module)
    inputs = sample_inputs(
        cache_tensors(program.graph), CachedShape(2, 5, 7), VOCABULARY, torch.device("cpu")
    )
    specs = exported.graph_signature.input_specs
    weights = [exported.state_dict[spec.target] for spec in specs if spec.target is not None]
    with torch.no_grad():
        expected = program.graph_module(*inputs)
        actual = torch.fx.Interpreter(exported.graph_module).run(*weights, *inputs)

    assert len(actual) == len(expected)
    assert all(relative_error(*pair) == 0.0 for pair in zip(actual, expected, strict=True))


def test_tensors_are_shared_and_the_graph_is_not_changed():
    module = lowered("llama").graph_module
    before = str(module.graph)

    exported = lifted(module)

    assert str(module.graph) == before
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(tensor is own[path] for path, tensor in exported.state_dict.items())
    assert exported.run_decompositions({}) is exported


def test_only_one_spelling_of_casts_and_reshapes_is_left():
    graph = lifted(lowered("llama", torch.float16).graph_module).graph

    aten = torch.ops.aten
    targets = {node.target for node in graph.nodes}
    assert not targets & {aten.to.dtype, aten.to.device, aten.__and__.Tensor}
    assert {aten._to_copy.default, aten.bitwise_and.Tensor} <= targets
    reshapes = [node for node in graph.nodes if node.target in (aten.view.default, aten.reshape.default)]
    assert reshapes and all(-1 not in node.args[1] for node in reshapes)


def test_a_graph_that_was_not_captured_is_refused():
    with pytest.raises(PassError, match="captured"):
        lifted(torch.fx.symbolic_trace(nn.Linear(2, 2)))
