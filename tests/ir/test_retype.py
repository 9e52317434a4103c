"""A program's twin in another type of number: the same graph, the same weights."""

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import capture
from dispfx.ir.retype import retyped


class Half(nn.Module):
    """Computes in bfloat16, casts up and down again, and ties two paths."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 11, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(8, dtype=torch.int32))

    def forward(self, ids: Tensor) -> Tensor:
        x_BTD = self.embedding(ids).index_select(-1, self.table)
        return self.head((x_BTD.float() * 0.5).to(torch.bfloat16))


def test_everything_of_the_old_type_is_of_the_new_one_and_the_module_is_not_changed():
    module = capture(Half(), vocabulary_size=11).graph_module
    code = module.code

    twin = retyped(module, torch.bfloat16, torch.float32)

    assert {tensor.dtype for tensor in twin.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in module.parameters()} == {torch.bfloat16} and module.code == code
    assert all(torch.bfloat16 not in [*node.args, *node.kwargs.values()] for node in twin.graph.nodes)
    values = [node.meta.get("val") for node in twin.graph.nodes]
    assert all(value.dtype is not torch.bfloat16 for value in values if isinstance(value, Tensor))


def test_the_twin_has_the_same_weights_and_computes_in_the_new_type():
    module = capture(Half(), vocabulary_size=11).graph_module
    ids = torch.tensor([[1, 2, 3]])

    twin = retyped(module, torch.bfloat16, torch.float32)

    weight = next(module.parameters()).float()
    assert torch.equal(next(twin.parameters()), weight)
    expected = (weight[ids] * 0.5) @ weight.T
    torch.testing.assert_close(twin(ids), expected)
    # bfloat16 has 8 bits; the module itself is that far away.
    assert not torch.equal(module(ids).float(), twin(ids))


def test_tensors_of_other_types_are_shared_and_ties_stay():
    module = capture(Half(), vocabulary_size=11).graph_module

    twin = retyped(module, torch.bfloat16, torch.float32)

    assert dict(twin.named_buffers())["table"] is dict(module.named_buffers())["table"]
    assert len(list(twin.parameters())) == 1
