"""A graph may differ from its module by what rounding does to that module, and by no more."""

import pytest
import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import IDENTITY_TOLERANCE, capture
from dispfx.capturing.rounding_noise import MOST, TIMES, most_allowed
from dispfx.errors import CaptureError
from tests.one_branch import VOCABULARY

WIDTH = 32


class Sensitive(nn.Module):
    """Its logits are differences of large numbers, so that rounding moves them by about 1e-5.

    Outside a trace it sums in another order, and multiplies its logits by `factor`.
    """

    def __init__(self, factor: float, large: float):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.other = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            self.head.bias.fill_(large)
            self.other.bias.fill_(large)
        self.factor = factor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(self.up(x).relu())
        if torch.compiler.is_exporting():
            return self.head(x) - self.other(x)
        half = WIDTH // 2
        first = x[..., :half] @ self.head.weight[:, :half].T + self.head.bias
        return (first + x[..., half:] @ self.head.weight[:, half:].T - self.other(x)) * self.factor


def sensitive(factor: float = 1.0, large: float = 300.0) -> Sensitive:
    torch.manual_seed(0)
    return Sensitive(factor, large).eval()


def encoder() -> nn.Module:
    """Return torch's post-norm encoder, which has a kernel that sums in another order."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1]).to(self.head.weight.dtype)
            return self.head(self.layers(self.embedding(ids), mask, is_causal=True))

    torch.manual_seed(0)
    return Encoder().eval()


def test_rounding_to_which_a_module_is_sensitive_is_allowed_and_reported():
    identity = capture(sensitive()).identity
    worst = max(found.relative for found in identity.values())
    assert IDENTITY_TOLERANCE < worst < 2e-5
    for found in identity.values():
        assert found.relative <= found.allowed <= MOST[torch.float32]


@pytest.mark.parametrize("large", [0.0, 300.0, 1e4])
def test_a_fault_of_one_in_ten_thousand_is_refused_however_sensitive_the_module(large: float):
    with pytest.raises(CaptureError, match="the graph must give the module's logits within"):
        capture(sensitive(1 + 1e-4, large))


def test_a_module_that_is_not_sensitive_gets_no_more_than_a_few_roundings():
    identity = capture(sensitive(large=0.0)).identity
    assert identity and all(found.allowed == IDENTITY_TOLERANCE for found in identity.values())
    with pytest.raises(CaptureError):
        capture(sensitive(1 + 1e-5, large=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_encoder_of_torch_is_captured_in_every_type(dtype: torch.dtype):
    identity = capture(encoder().to(dtype)).identity
    assert identity
    assert all(found.relative <= found.allowed <= MOST[dtype] for found in identity.values())


def test_a_fault_that_half_precision_hides_is_found_in_float32():
    with pytest.raises(CaptureError, match="must give the module's logits within"):
        capture(sensitive(1 + 4e-3, large=0.0).to(torch.bfloat16))


def test_the_coarsest_type_decides_what_is_allowed_at_most():
    tensors = [torch.zeros(1, dtype=dtype) for dtype in (torch.int8, torch.float32, torch.bfloat16)]
    assert most_allowed(tensors) == MOST[torch.bfloat16] and most_allowed([]) == 0.0
    assert TIMES * 1e-7 < IDENTITY_TOLERANCE, (
        "what one rounding does in float32 is within the usual tolerance"
    )
