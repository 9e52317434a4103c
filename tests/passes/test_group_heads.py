"""group-heads: keys and values that are repeated for attention are read once."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.compiler.programs import lower_program
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.group_heads import GroupHeads
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY, WIDTH
from tests.passes.golden import calls_of, names_of
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

SIZE = 4


class Attention(nn.Module):
    """Four query heads; keys and values have fewer, and are repeated."""

    def __init__(self, key_heads: int = 2, value_heads: int = 2, *, order: str = "neighbours"):
        super().__init__()
        self.query = nn.Linear(WIDTH, 4 * SIZE, bias=False)
        self.key = nn.Linear(WIDTH, key_heads * SIZE, bias=False)
        self.value = nn.Linear(WIDTH, value_heads * SIZE, bias=False)
        self.out = nn.Linear(4 * SIZE, WIDTH, bias=False)
        self.order = order

    def repeated(self, x: Tensor) -> Tensor:
        batch, heads, tokens, size = x.shape
        times = 4 // heads
        if self.order == "cycles":
            return x[:, None].expand(batch, times, heads, tokens, size).reshape(batch, 4, tokens, size)
        return x[:, :, None].expand(batch, heads, times, tokens, size).reshape(batch, 4, tokens, size)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(
            query, self.repeated(key), self.repeated(value), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = attention
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.attention(x))


def lowered(attention: nn.Module) -> Program:
    torch.manual_seed(0)
    program = dispfx.capture(perturb(Decoder(attention)))
    return lower_program(program, Plan.random(program, 0.0, seed=0))


def test_repeated_keys_and_values_are_read_once():
    program = lowered(Attention())
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    Pipeline([GroupHeads()]).run(program)
    assert calls_of(program, "scaled_dot_product_attention") == (
        "scaled_dot_product_attention(transpose, transpose_1, transpose_2, None, 0.0, True, "
        "enable_gqa=True): (B, 4, T, 4) float32"
    )
    assert not calls_of(program, "expand")
    assert relative_error(program.graph_module(ids), before) <= 1e-6


def test_heads_repeated_in_another_order_are_left_alone():
    """Rule 2."""
    unchanged(lowered(Attention(order="cycles")))


def test_keys_and_values_repeated_unequally_are_left_alone():
    """Rule 1."""
    unchanged(lowered(Attention(key_heads=2, value_heads=1)))


def test_heads_repeated_once_are_read_as_they_are():
    program = lowered(Attention(key_heads=4, value_heads=4))
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    Pipeline([GroupHeads()]).run(program)
    assert not calls_of(program, "expand")
    assert relative_error(program.graph_module(ids), before) <= 1e-6


def test_a_second_run_changes_nothing():
    """Rule 3."""
    pipeline = Pipeline([GroupHeads(), GroupHeads()])
    pipeline.run(lowered(Attention()))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]


def unchanged(program: Program) -> None:
    names = names_of(program)
    pipeline = Pipeline([GroupHeads()])
    pipeline.run(program)
    assert not pipeline.ran[0].result.changed
    assert names_of(program) == names
