"""A decoder of a kind that no library has: it compiles without a word about it in the compiler.

Each layer adds two branches, neither of which is an attention or a plain MLP:

    x + α · mixer(x)      running means of two projections, one gating the other
    x + norm(bilinear(x)) two factors kept in one stacked weight (2, in, out), multiplied, squared
"""

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.analysis.coverage import coverage
from dispfx.plan.plan import Plan
from dispfx.verification.equivalence import ModuleDecoder
from dispfx.verification.graphs import zeroed_tensors
from tests.plain_decoders import RMSNorm, perturb
from tests.programs import relative_error, token_ids

VOCABULARY, WIDTH, INNER, LAYERS = 61, 32, 40, 2


class RunningMeans(nn.Module):
    """Mean over all tokens so far of one projection, gated by another."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
        self.into = nn.Parameter(torch.randn(WIDTH, 2 * INNER) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(INNER, WIDTH) / INNER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (self.norm(x) @ self.into).unflatten(-1, (2, INNER)).unbind(-2)
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        return (value.cumsum(1) / count * torch.sigmoid(gate)) @ self.out


class Bilinear(nn.Module):
    """Two projections from one stacked weight, multiplied and squared; the norm is on the output."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.randn(2, WIDTH, INNER) / WIDTH**0.5)
        self.down = nn.Linear(INNER, WIDTH)
        self.norm = RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        left = torch.einsum("btd,df->btf", x, self.factors[0])
        right = torch.einsum("btd,df->btf", x, self.factors[1])
        return self.norm(self.down((left * right).square()))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.bilinear = RunningMeans(), Bilinear()
        self.strength = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.strength * self.mixer(x)
        return x + self.bilinear(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Decoder())


def test_both_branches_offer_their_sites_and_nothing_is_refused(model: nn.Module):
    program = dispfx.capture(model)
    assert not program.refused
    assert [branch.kind for branch in program.branches] == ["mixer", "mlp"] * LAYERS
    assert {(site.branch_kind, site.kind) for site in program.sites} >= {
        ("mixer", "read"), ("mixer", "write"), ("mlp", "read"), ("mlp", "inner"), ("mlp", "write"),
    }  # fmt: skip
    assert coverage(program).share == 1.0, coverage(program).ungated


def test_the_pruned_decoder_is_the_module_with_zeros(model: nn.Module):
    program = dispfx.capture(model)
    for seed in range(3):
        plan = Plan.random(program, 0.4, seed)
        zeroed = ModuleDecoder(model, zeroed_tensors(program, plan))
        for shape in ((2, 9), (1, 17)):
            ids = token_ids(*shape)
            expected = dispfx.gated(program, plan)(ids)
            assert relative_error(dispfx.lower(program, plan)(ids), expected) <= 1e-5
            assert relative_error(zeroed(ids), expected) <= 1e-5
