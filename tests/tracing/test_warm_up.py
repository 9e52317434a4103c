"""Decoders that make masks and tables where they need them are captured for texts of the asked length."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.capturing.module_capture import capture
from dispfx.capturing.warm_up import warm_up
from dispfx.errors import CaptureError
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY, WIDTH
from tests.programs import relative_error, token_ids


class Decoder(nn.Module):
    """An attention whose mask, and positions that a test makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def mask(self, tokens: int) -> Tensor:
        return torch.full((tokens, tokens), float("-inf")).triu(1)

    def positions(self, tokens: int) -> Tensor:
        return table_of(tokens)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.embedding(ids) + self.positions(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, self.mask(tokens))))


def table_of(tokens: int) -> Tensor:
    return torch.sin(torch.arange(tokens)[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH))


class MaskOnFirstUse(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None, persistent=False)

    def mask(self, tokens: int) -> Tensor:
        if self.made is None or self.made.shape[0] < tokens:
            self.made = super().mask(tokens)
        return self.made[:tokens, :tokens]


class GrowingBuffer(Decoder):
    """As rotary caches of older code: made for some length, and made anew where a text is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(40)

    def grow(self, tokens: int) -> None:
        self.max_seq_len_cached = tokens
        self.register_buffer("table", table_of(tokens), persistent=False)

    def positions(self, tokens: int) -> Tensor:
        if tokens > self.max_seq_len_cached:
            self.grow(tokens)
        return self.table[:tokens]  # type: ignore[index]


class OwnObject(Decoder):
    """The table is held by something that is no module."""

    class Table:
        held: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.of = self.Table()

    def positions(self, tokens: int) -> Tensor:
        if self.of.held is None or len(self.of.held) < tokens:
            self.of.held = table_of(tokens)
        return self.of.held[:tokens]


class CachedProperty(Decoder):
    @functools.cached_property
    def whole(self) -> Tensor:
        return table_of(300)

    def positions(self, tokens: int) -> Tensor:
        return self.whole[:tokens]


class CachedMethod(Decoder):
    """Both are remembered by the length of the text."""

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def mask(self, tokens: int) -> Tensor:
        return super().mask(tokens)

    def positions(self, tokens: int) -> Tensor:
        return cached_table(tokens, WIDTH)


@functools.lru_cache
def cached_table(tokens: int, width: int) -> Tensor:
    return table_of(tokens)[:, :width]


KINDS = (Decoder, MaskOnFirstUse, GrowingBuffer, OwnObject, CachedProperty, CachedMethod)


def made(kind: Callable[[], Decoder]) -> Decoder:
    torch.manual_seed(0)
    return kind().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_with_tables_is_captured_for_the_asked_length(kind: type[Decoder]):
    model, ids = made(kind), token_ids(2, 200, vocabulary=VOCABULARY)
    before = dict(vars(model))
    program = capture(model, longest=200)
    assert {name: id(value) for name, value in vars(model).items()} == {
        name: id(value) for name, value in before.items()
    }
    with torch.no_grad():
        for tokens in (200, 7):
            assert torch.equal(program.graph_module(ids[:, :tokens]), made(kind)(ids[:, :tokens]))
            assert torch.equal(program.graph_module(ids[:, :tokens]), model(ids[:, :tokens]))


@pytest.mark.parametrize("kind", [MaskOnFirstUse, GrowingBuffer])
def test_such_a_decoder_is_pruned(kind: type[Decoder]):
    program = dispfx.capture(made(kind))
    plan = Plan.random(program, 0.3, 0)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert relative_error(dispfx.lower(program, plan)(ids), dispfx.gated(program, plan)(ids)) <= 1e-5


def test_what_a_cached_function_remembers_has_values():
    cached_table.cache_clear()
    capture(made(CachedMethod))
    for tokens in (13, 17):
        assert type(cached_table(tokens, WIDTH)) is Tensor
    assert isinstance(CachedMethod.mask, functools._lru_cache_wrapper)


def test_the_longest_length_is_halved_until_the_module_takes_it():
    tried: list[int] = []

    def run(tokens: int) -> None:
        tried.append(tokens)
        if tokens > 70:
            raise CaptureError("too long")

    assert warm_up(run, 200) and tried == [200, 100, 50]
    assert not warm_up(lambda tokens: run(1000), 200)
