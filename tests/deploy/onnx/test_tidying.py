"""Constants are folded and idle operators dropped, and no weight outlives the model."""

import gc
import operator
import weakref
from typing import Any

import onnx_ir as ir
import pytest
import torch

from dispfx.capturing.cached_capture import export_cached_program
from dispfx.deploy.onnx import exporting
from dispfx.deploy.onnx.exporting import cached_model, silence
from dispfx.deploy.onnx.lifting import lifted
from dispfx.deploy.onnx.tidying import tidy
from dispfx.ir.program import Program
from tests.deploy.onnx.cached_models import lowered


def translated(program: Program, **options: Any) -> ir.Model:
    """Return what the exporter of torch makes of a program."""
    with silence():
        exported = lifted(program.graph_module)
        found = torch.onnx.export(exported, dynamo=True, opset_version=23, verbose=False, **options)
    assert found is not None
    return found.model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_graph_is_the_one_that_all_rules_of_the_exporter_give(dtype: torch.dtype):
    program = lowered("llama", dtype)
    expected = translated(program, optimize=True)
    model = translated(program, optimize=False)
    before = len(list(model.graph))

    tidy(model)

    assert [node.op_type for node in model.graph] == [node.op_type for node in expected.graph]
    assert len(list(model.graph)) < before / 1.5


def test_weights_are_gone_with_the_model():
    program = lowered("llama").clone()
    tensors = {path: torch.nn.Parameter(tensor.clone(), False) for path, tensor in program.parameters.items()}
    program.rebuild({**dict(program.tensors()), **tensors})
    watched = weakref.ref(next(program.graph_module.parameters()))
    del tensors

    model = cached_model(program)
    assert watched() is not None
    del program, model
    gc.collect()

    assert watched() is None


def test_operations_that_onnx_does_not_know_are_decomposed_first(monkeypatch: pytest.MonkeyPatch):
    program, traced = lowered("llama").clone(), []
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.silu.default:
            # silu(x) is x · exp(logsigmoid(x)), of which only the parts are known.
            with program.graph.inserting_before(node):
                logged = program.graph.call_function(
                    torch.ops.aten.log_sigmoid_forward.default, (node.args[0],)
                )
                gate = program.graph.call_function(
                    torch.ops.aten.exp.default, (_first_of(program, logged, node),)
                )
                same = program.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], gate))
            for new in (gate, same):
                new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(same)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()

    def watched(module: torch.fx.GraphModule, *, context: int | None = None):
        traced.append(module)
        return export_cached_program(module, context=context)

    monkeypatch.setattr(exporting, "export_cached_program", watched)
    model = cached_model(program)

    assert traced and "MatMul" in [node.op_type for node in model.graph]


def _first_of(program: Program, pair: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    value = like.meta["val"]
    pair.meta["val"] = (value, value)
    item = program.graph.call_function(operator.getitem, (pair, 0))
    item.meta["val"] = value
    return item
