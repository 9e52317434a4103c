"""What `torch.vmap` maps over sequences, or over experts, is pruned as if it were written out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from tests import plain_decoders
from tests.one_branch import require_one_function


class Mapped(nn.Module):
    """A module that is called for every sequence of a batch."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda sequence: 2.0 * self.inner(sequence))(x)


class MappedExperts(nn.Module):
    """The mean of experts, whose stacked weights are mapped over."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.2 * torch.randn(3, plain_decoders.WIDTH, plain_decoders.INNER))
        self.down = nn.Parameter(0.2 * torch.randn(3, plain_decoders.INNER, plain_decoders.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def expert(up: Tensor, down: Tensor) -> Tensor:
            return F.gelu(x @ up) @ down

        return torch.vmap(expert)(self.up, self.down).mean(0)


@pytest.mark.parametrize("of", ["batch", "experts", "norm"])
def test_what_is_mapped_by_vmap_is_pruned_as_if_it_were_written_out(of: str):
    decoder: Any = plain_decoders.build(plain_decoders.FORMS["pre-norm"])
    for layer in decoder.layers:
        if of == "norm":
            layer.mlp_norm = Mapped(layer.mlp_norm)
        else:
            layer.mlp = Mapped(layer.mlp) if of == "batch" else MappedExperts()
    program = dispfx.capture(decoder)
    assert len(program.sites) == 10 and not program.refused
    require_one_function(decoder, program, 0.4)
