"""Decoders whose arithmetic depends on the length of the text; all of them read 64 tokens at most."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.plain_decoders import FORMS, build

Scale = Callable[[int, Tensor], Tensor]


class Scaled(nn.Module):
    """An MLP whose input passes through a function of the number of tokens."""

    def __init__(self, mlp: nn.Module, scale: Scale):
        super().__init__()
        self.mlp, self.scale = mlp, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.scale(x.shape[1], x))


def scaled(scale: Scale) -> nn.Module:
    """Return a decoder in which `scale(tokens, x)` stands before the second layer's MLP."""
    decoder: Any = build(FORMS["pre-norm"])
    decoder.layers[1].mlp = Scaled(decoder.layers[1].mlp, scale)
    return decoder


def growing(tokens: int, x: Tensor) -> Tensor:
    """Scale the texts of more than 24 tokens."""
    return x * (1 + math.log(tokens / 24)) if tokens > 24 else x


def long_texts() -> nn.Module:
    """Compute texts of more than 24 tokens otherwise."""
    return scaled(growing)
