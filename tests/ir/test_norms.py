"""Norms are recognised with what is needed to compute them, however a module spells them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dispfx.ir.norms import Norm, norm_of

WIDTH = 8


class Spelled(nn.Module):
    def __init__(self, spelling: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(WIDTH).to(dtype)) for _ in range(2))
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(x, self.weight, self.bias)


def found_in(spelling: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype) -> Norm | None:
    given = (torch.randn(2, 3, WIDTH).to(dtype),)
    program = torch.export.export(Spelled(spelling, dtype), given)  # noqa: TID251 - one operation, no decoder
    graph: fx.Graph = program.graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    known = {node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("p_")}
    for node in graph.nodes:
        if node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
    return norm_of(output.args[0][0], known.__contains__)


def spelled_out(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    whole = x.float()
    return weight * (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def shifted_weight(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    whole = x.float()
    normal = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normal * (1.0 + weight.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("spelling", "eps", "is_rms", "rounds", "has_bias"),
    [
        (lambda x, w, b: F.layer_norm(x, (WIDTH,), w, b, 1e-6), 1e-6, False, False, True),
        (lambda x, w, b: F.layer_norm(x, (WIDTH,), w), 1e-5, False, False, False),
        (lambda x, w, b: F.rms_norm(x, (WIDTH,), w, 1e-4), 1e-4, True, False, False),
        (lambda x, w, b: F.rms_norm(x, (WIDTH,), w), torch.finfo(torch.float32).eps, True, False, False),
        (spelled_out, 1e-6, True, True, False),
        (shifted_weight, 1e-6, True, False, False),
    ],
)
def test_a_norm_is_found_with_what_it_is_computed_from(
    spelling: Callable[[Tensor, Tensor, Tensor], Tensor],
    eps: float,
    is_rms: bool,
    rounds: bool,
    has_bias: bool,
    dtype: torch.dtype,
):
    found = found_in(spelling, dtype)
    assert found is not None and found.value.name == "x" and found.weight.meta["val"].shape == (WIDTH,)
    assert (found.eps, found.is_rms, found.bias is not None) == (eps, is_rms, has_bias)
    assert found.rounds is (rounds and dtype == torch.bfloat16)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x, w, b: F.layer_norm(x, (WIDTH,)),
        lambda x, w, b: F.rms_norm(x, (WIDTH,)),
        lambda x, w, b: F.layer_norm(x, (3, WIDTH)),
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w, b: w * (b * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        lambda x, w, b: (w * x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ],
)
def test_what_is_near_to_a_norm_is_none(spelling: Callable[[Tensor, Tensor, Tensor], Tensor]):
    assert found_in(spelling, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_torch_adds_by_itself_is_known(dtype: torch.dtype):
    found = found_in(lambda x, w, b: F.rms_norm(x, (WIDTH,), w), dtype)
    assert found is not None
    x = torch.full((WIDTH,), 1e-4, dtype=dtype)
    told = x.double() * (x.double().square() + found.eps).rsqrt()
    torch.testing.assert_close(F.rms_norm(x, (WIDTH,)).double(), told, rtol=1e-2, atol=0)
