"""Small decoders in plain torch, one for each way to arrange a layer.

No library of models is involved: each is an `nn.Module` from token ids (B, T) to logits (B, T, V), as a
user would write one.  Constant parameters are perturbed, so that a wrong rewrite cannot hide behind
zeros and ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61
WIDTH = 32
HEADS = 4
INNER = 48


@dataclass(frozen=True)
class Form:
    """How a layer is arranged.

    Args:
        arrangement: sequential, parallel-one-add or parallel-two-adds.
        norm: rms or layer.
        mlp: gated, fused-gated or plain.
        fused_qkv: query, key and value in one weight.
        tied: embedding and head share one weight.
        bias: projections have biases.
    """

    arrangement: str = "sequential"
    norm: str = "rms"
    mlp: str = "gated"
    fused_qkv: bool = False
    tied: bool = False
    bias: bool = False


FORMS = {
    "pre-norm": Form(),
    "parallel-one-add": Form(arrangement="parallel-one-add", norm="layer", mlp="plain", bias=True),
    "parallel-two-adds": Form(arrangement="parallel-two-adds", norm="layer", mlp="plain"),
    "fused-qkv": Form(fused_qkv=True, norm="layer", bias=True),
    "fused-gate-up": Form(mlp="fused-gated", fused_qkv=True),
    "plain-mlp": Form(mlp="plain", bias=True),
    "layer-norm-with-bias": Form(norm="layer", bias=True),
    "tied-embeddings": Form(tied=True),
}


class RMSNorm(nn.Module):
    """x · rsqrt(mean(x²) + ε) · w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, form: Form):
        super().__init__()
        self.fused = form.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=form.bias)
        else:
            self.query = nn.Linear(WIDTH, WIDTH, bias=form.bias)
            self.key = nn.Linear(WIDTH, WIDTH, bias=form.bias)
            self.value = nn.Linear(WIDTH, WIDTH, bias=form.bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=form.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            parts = self.qkv(x).split(WIDTH, dim=-1)
        else:
            parts = (self.query(x), self.key(x), self.value(x))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """A gated or plain feed-forward branch."""

    def __init__(self, form: Form):
        super().__init__()
        self.kind = form.mlp
        if form.mlp == "fused-gated":
            self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=form.bias)
        else:
            self.up = nn.Linear(WIDTH, INNER, bias=form.bias)
        if form.mlp == "gated":
            self.gate = nn.Linear(WIDTH, INNER, bias=form.bias)
        self.down = nn.Linear(INNER, WIDTH, bias=form.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "plain":
            return self.down(F.gelu(self.up(x)))
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, form: Form):
        super().__init__()
        make = RMSNorm if form.norm == "rms" else lambda: nn.LayerNorm(WIDTH)
        self.arrangement = form.arrangement
        self.attention_norm = make()
        self.mlp_norm = make()
        self.attention = Attention(form)
        self.mlp = MLP(form)

    def forward(self, x: Tensor) -> Tensor:
        if self.arrangement == "sequential":
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.mlp_norm(x))
        attention = self.attention(self.attention_norm(x))
        mlp = self.mlp(self.mlp_norm(x))
        return x + (attention + mlp) if self.arrangement == "parallel-one-add" else (x + attention) + mlp


class Decoder(nn.Module):
    """Embedding with learned positions, layers, norm, head."""

    def __init__(self, form: Form, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(64, WIDTH))
        self.layers = nn.ModuleList(Layer(form) for _ in range(layers))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if form.tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def perturb(model: nn.Module) -> nn.Module:
    """Add noise to every parameter that is one number throughout, and return the model in eval mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            if len(parameter.unique()) == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def build(form: Form, *, layers: int = 2, seed: int = 0) -> Decoder:
    """Return a seeded decoder of a form."""
    torch.manual_seed(seed)
    decoder = Decoder(form, layers)
    perturb(decoder)
    return decoder
