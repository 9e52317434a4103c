"""Decoders of one residual branch, whose middle a test writes as a function.

logits = head(x + down(middle(up(x))))        x = embedding(ids)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dispfx
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import zeroed_decoder
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

WIDTH, INNER, VOCABULARY = 16, 24, 31
# Sums of two dozen float32 numbers in another order.
ORDER_OF_SUMS = 1e-5


def to_logits(decoder: "OneBranch", x: Tensor) -> Tensor:
    """Return the logits of the residual stream."""
    return decoder.head(x)


class OneBranch(nn.Module):
    """Embedding, one residual addition, and an end: what the decoder gives for its residual stream."""

    mlp: Any

    def __init__(self, mlp: nn.Module, end: Callable[["OneBranch", Tensor], Any] = to_logits):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = mlp
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.end = end

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        return self.end(self, x + self.mlp(x))


class Middle(nn.Module):
    """down(middle(up(x))); `scale` and `order` are there for the middle to use."""

    order: Tensor

    def __init__(
        self, middle: Callable[["Middle", Tensor], Tensor], *, up: int = INNER, down: int = INNER, bias=True
    ):
        super().__init__()
        self.up = nn.Linear(WIDTH, up, bias=bias)
        self.down = nn.Linear(down, WIDTH, bias=bias)
        self.scale = nn.Parameter(0.5 + torch.rand(down))
        self.register_buffer("order", torch.randperm(up))
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self, self.up(x)))


def one_branch(mlp: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a seeded decoder in evaluation mode."""
    torch.manual_seed(seed)
    return perturb(OneBranch(mlp()))


def require_one_function(
    model: nn.Module, program: Program, ratio: float = 0.4, plans: Sequence[Plan] | None = None
) -> None:
    """Pass if gated, lowered, gathered and the zeroed module agree for random or given plans, and matter."""
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    with torch.no_grad():
        for plan in plans or [Plan.random(program, ratio, seed) for seed in range(2)]:
            gated = dispfx.gated(program, plan)(ids)
            assert relative_error(gated, model(ids)) > 1e-4, "the plan must remove something that matters"
            zeroed = zeroed_decoder(program, plan, model)(ids)
            assert relative_error(zeroed, gated) <= ORDER_OF_SUMS
            for write in ("index-add", "gather-add"):
                lowered = dispfx.lower(program, plan, write=write)(ids)
                assert relative_error(lowered, gated) <= ORDER_OF_SUMS, write
