"""Products of one value whose gradient is summed where it is written."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dispfx.fast_decoder.decoder import compiled_function
from dispfx.fast_decoder.sibling_products import join_siblings, sibling_products, sum_of_products
from dispfx.ir.ops import aten
from tests.training.gated import WithValues


def operands(
    outputs: list[int], inputs: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(rows, inputs, generator=generator).to(dtype) for rows in outputs]
    biases = [torch.randn(rows, generator=generator).to(dtype) for rows in outputs]
    return weights, biases if bias else []


def plain(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    each = biases or [None] * len(weights)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, each, strict=True)]


def joined(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return torch.ops.dispfx.sibling_products(x, weights, biases)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_are_those_of_each_layer_and_the_gradient_is_their_sum(
    dtype: torch.dtype, tolerance: float, bias: bool
) -> None:
    given = operands([24, 8, 8], 16, dtype, bias=bias)
    x_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for way in (plain, joined):
        x = x_BTD.clone().requires_grad_()
        values = way(x, *given)
        torch.cat([value.sin() * index for index, value in enumerate(values, 1)], -1).sum().backward()
        results.append((*values, x.grad))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, results[0][:3], results[1][:3]))


def test_a_sibling_that_nothing_reads_adds_nothing_to_the_gradient() -> None:
    weights, biases = operands([4, 6], 3, torch.float64)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    joined(x, weights, biases)[0].sum().backward()
    torch.testing.assert_close(x.grad, weights[0].sum(0).expand(2, 3))


def test_a_compiled_function_has_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    given = operands([24, 8, 8], 16, torch.float32, bias=True)
    grads = []
    for call in (plain, compiled_function(joined)):
        x = torch.linspace(-1, 1, 2 * 5 * 16).view(2, 5, 16).requires_grad_()
        q, k, v = call(x, *given)
        (q.sum() + (k * v).sum()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-4)


# torch's own check looks at `.grad` of what it computed, which torch 2.14 says something about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_both_operations_are_well_behaved() -> None:
    left = [torch.randn(5, rows, dtype=torch.float64) for rows in (3, 4)]
    right = [torch.randn(rows, 6, dtype=torch.float64) for rows in (3, 4)]
    torch.testing.assert_close(sum_of_products(left, right), left[0] @ right[0] + left[1] @ right[1])
    torch.library.opcheck(sum_of_products, (left, right))
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    weights = [right[0].T, right[1][:, :3]]
    torch.library.opcheck(sibling_products, (x, weights, []))
    torch.library.opcheck(
        sibling_products, (x, weights, [weight.new_ones(len(weight)) for weight in weights])
    )


class Projections(nn.Module):
    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor, other: Tensor, third: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        first = aten.linear.default(x, weight)
        elsewhere = aten.linear.default(y, weight)
        second = aten.linear.default(x, bias=None, weight=other)
        with_bias = aten.linear.default(x, third, bias)
        made = aten.linear.default(x, first.T)
        one_number = aten.linear.default(x, bias)
        return first, elsewhere, second, with_bias, made, one_number


def test_layers_that_read_one_value_with_frozen_weights_are_joined_and_no_others() -> None:
    module = fx.symbolic_trace(Projections())
    values = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    given = (*values, torch.randn(4))
    expected = WithValues(module).run(*given)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert join_siblings(module.graph, inputs[2:]) == 1
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert targets.count(torch.ops.dispfx.sibling_products.default) == 1
    assert targets.count(operator.getitem) == 2 and targets.count(aten.linear.default) == 4
    assert all(map(torch.equal, module(*given), expected))


def test_nothing_is_joined_where_a_weight_may_need_a_gradient() -> None:
    module = fx.symbolic_trace(Projections())
    WithValues(module).run(*[torch.ones(4, 4)] * 5, torch.ones(4))
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert join_siblings(module.graph, inputs[2:3]) == 0
