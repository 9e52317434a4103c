"""A language model small enough to learn masks for in a second, with its gates written by hand.

Every layer is an MLP branch with a read, an inner and a write site; the text is a random Markov
chain, so that a trained decoder knows something to lose.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispfx.ir.gate import gate
from dispfx.ir.sites import Site, SiteKind, Slice
from dispfx.learning.text import Batches, TokenBatches
from dispfx.learning.trainer import LearningTask
from dispfx.plan.budget import Budget
from dispfx.settings.learning_settings import LearnSettings

VOCABULARY, WIDTH, INNER, LAYERS, TOKENS = 24, 64, 192, 2, 16


class TinyDecoder(nn.Module):
    """forward(ids_BT, [read, inner, write masks of every layer]) -> logits_BTV."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, layers: int = LAYERS):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        sizes: list[tuple[SiteKind, int]] = [("read", width), ("inner", inner), ("write", width)]
        self.sites = tuple(
            Site(f"layer.{i}.{kind}", f"layer.{i}", "mlp", kind, size, _slices(i, kind))
            for i in range(layers)
            for kind, size in sizes
        )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}

    def dense(self, ids_BT: Tensor) -> Tensor:
        return self(ids_BT, [torch.ones(site.size) for site in self.sites])

    def forward(self, ids_BT: Tensor, masks) -> Tensor:
        stream = self.embed(ids_BT)
        for layer, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            read, inner, write = masks[3 * layer : 3 * layer + 3]
            read_value = gate(F.rms_norm(stream, (stream.shape[-1],)), read, 2)
            stream = stream + gate(down(gate(F.gelu(up(read_value)), inner, 2)), write, 2)
        return self.head(F.rms_norm(stream, (stream.shape[-1],)))


def _slices(layer: int, kind: SiteKind) -> tuple[Slice, ...]:
    up, down = f"up.{layer}.weight", f"down.{layer}.weight"
    return {
        "read": (Slice(up, 1),),
        "inner": (Slice(up, 0), Slice(down, 1)),
        "write": (Slice(down, 0),),
    }[kind]


def markov_tokens(length: int, seed: int = 0) -> Tensor:
    """Return a text in which every token has one likely successor and two less likely ones."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 3), generator=generator)
    choices = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), length, True, generator=generator)
    tokens, token = [], 0
    for choice in choices.tolist():
        token = int(successors[token, choice])
        tokens.append(token)
    return torch.tensor(tokens)


def untrained_decoder() -> TinyDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return TinyDecoder().requires_grad_(False)


def trained_decoder(tokens: Tensor) -> TinyDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        decoder = TinyDecoder()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=3e-3)
    text = TokenBatches(tokens, TOKENS, 32, seed=5)
    for step in range(150):
        ids_BT = text.batch(step)
        loss = F.cross_entropy(decoder.dense(ids_BT)[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return decoder.requires_grad_(False)


def settings(**changes: Any) -> LearnSettings:
    start = LearnSettings(steps=6, seq_len=TOKENS, batch_size=4, save_every=100, seed=3)
    return replace(start, **changes)


def batches(tokens: Tensor, chosen: LearnSettings) -> TokenBatches:
    return TokenBatches.split(tokens, seq_len=chosen.seq_len, batch_size=chosen.batch_size, seed=chosen.seed)


def task_of(
    decoder: Any, text: Batches, budget: Budget, chosen: LearnSettings, **others: Any
) -> LearningTask:
    """Return what is to be learned from a text; `others` are fields of the task."""
    sites, shapes = decoder.sites, decoder.shapes
    return LearningTask(
        gated=decoder, sites=sites, shapes=shapes, text=text, budget=budget, settings=chosen, **others
    )
