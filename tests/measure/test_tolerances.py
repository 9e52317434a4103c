"""The tolerance of a comparison is that of the least precise dtype."""

import pytest
import torch
from torch import nn

import dispfx
from dispfx.verification.graphs import tolerance_of, tolerance_of_module
from tests.plain_decoders import FORMS, Decoder


class InHalf(nn.Module):
    """Computes a module in bfloat16."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.bfloat16()).to(x.dtype)


class InFloat(InHalf):
    """Computes a module in float32."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.module = module.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.float().to(x.dtype))


def decoder(dtype: torch.dtype, within: type[InHalf] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(FORMS["pre-norm"], layers=1).eval().to(dtype)
    if within is not None:
        model.layers[0].mlp = within(model.layers[0].mlp)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    "dtype, within, tolerance",
    [
        (torch.float32, None, 1e-4),
        (torch.float32, InHalf, 5e-2),
        (torch.bfloat16, None, 5e-2),
        (torch.float64, None, 1e-12),
        (torch.float64, InFloat, 1e-4),
    ],
)
def test_the_least_precise_dtype_counts(dtype: torch.dtype, within: type[InHalf] | None, tolerance: float):
    model = decoder(dtype, within)
    assert tolerance_of(dispfx.capture(model)) == tolerance
    assert tolerance_of_module(model) == (tolerance if within is not InFloat else 1e-12)
