"""Decoders in plain torch as other code bases arrange them: written here, registered nowhere.

Each function is a MODEL as `tests.foreign_decoders:name` and returns the same decoder at every call.

    nano()    after nanoGPT: query, key and value from one weight, learned positions, tied head, GELU
    lit()     after LitGPT: one class for many forms; query, key and value interleaved by group, rotary
              positions from buffers, gated MLP, branches side by side
    x()       after x-transformers: layers are lists of (norm, block) pairs, heads by reshapes and einsums,
              a mask by triu, a gated linear unit in a Sequential, scaled residuals
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plain_decoders import perturb

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST = 61, 32, 4, 2, 64


class NanoNorm(nn.Module):
    """Layer norm with an optional bias."""

    def __init__(self, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoAttention(nn.Module):
    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = NanoNorm(True), NanoAttention()
        self.ln_2, self.mlp = NanoNorm(False), NanoMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LONGEST, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(NanoBlock() for _ in range(LAYERS)),
                "ln_f": NanoNorm(True),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@dataclass(frozen=True)
class LitConfig:
    n_query_groups: int = 2
    head_size: int = 8
    intermediate_size: int = 48
    parallel_residual: bool = True
    shared_attention_norm: bool = False


class LitNorm(nn.Module):
    """RMS norm that adds one to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6)
        return (x * (1 + self.weight.float())).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


class LitAttention(nn.Module):
    def __init__(self, config: LitConfig):
        super().__init__()
        self.config = config
        heads = HEADS + 2 * config.n_query_groups
        self.attn = nn.Linear(WIDTH, heads * config.head_size, bias=False)
        self.proj = nn.Linear(config.head_size * HEADS, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.size()
        groups, size = self.config.n_query_groups, self.config.head_size
        per_group = HEADS // groups
        qkv = self.attn(x).view(B, T, groups, per_group + 2, size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        k, v = k.expand(B, groups, per_group, T, size), v.expand(B, groups, per_group, T, size)
        q, k, v = (part.reshape(B, -1, T, size) for part in (q, k, v))
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, size * HEADS))


class LitMLP(nn.Module):
    def __init__(self, config: LitConfig):
        super().__init__()
        self.fc_1 = nn.Linear(WIDTH, config.intermediate_size, bias=False)
        self.fc_2 = nn.Linear(WIDTH, config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.silu(self.fc_1(x)) * self.fc_2(x))


class LitBlock(nn.Module):
    def __init__(self, config: LitConfig):
        super().__init__()
        self.config = config
        self.norm_1, self.attn = LitNorm(), LitAttention(config)
        self.norm_2 = None if config.shared_attention_norm else LitNorm()
        self.mlp = LitMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attention = self.attn(normed, cos, sin)
        if self.config.parallel_residual:
            return self.mlp(normed if self.norm_2 is None else self.norm_2(x)) + attention + x
        x = attention + x
        assert self.norm_2 is not None
        return self.mlp(self.norm_2(x)) + x


class Lit(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: LitConfig):
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(LitBlock(config) for _ in range(LAYERS))
        self.ln_f = LitNorm()
        turns = 1.0 / (10_000 ** (torch.arange(0, config.head_size, 2).float() / config.head_size))
        angles = torch.outer(torch.arange(LONGEST), turns).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor) -> Tensor:
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        x = self.wte(idx) * WIDTH**0.5
        for block in self.h:
            x = block(x, cos, sin)
        return self.lm_head(self.ln_f(x))


class XNorm(nn.Module):
    """The vector's direction, scaled by one learned number a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * WIDTH**0.5 * self.g


class XAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_v_gate = nn.Linear(WIDTH, WIDTH)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).reshape(*x.shape[:2], HEADS, -1).permute(0, 2, 1, 3)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * (WIDTH // HEADS) ** -0.5
        i, j = dots.shape[-2:]
        causal = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        slopes = torch.tensor([2.0**-head for head in range(1, HEADS + 1)], device=x.device)
        distance = torch.arange(j, device=x.device)[None, :] - torch.arange(i, device=x.device)[:, None]
        dots = dots + slopes[:, None, None] * distance
        attention = dots.masked_fill(causal, -torch.finfo(dots.dtype).max).softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attention, v).permute(0, 2, 1, 3).flatten(2)
        return self.to_out(out * self.to_v_gate(x).sigmoid())


class GLU(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * inner)
        self.mult_bias = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate) * self.mult_bias


class X(nn.Module):
    def __init__(self, inner: int = 40) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([])
        for _ in range(LAYERS):
            ff = nn.Sequential(GLU(inner), nn.Dropout(0.0), nn.Linear(inner, WIDTH))
            for block in (XAttention(), ff):
                self.layers.append(nn.ModuleList([XNorm(), block]))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in self.layers)
        self.final_norm, self.to_logits = XNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, return_embeddings: bool = False) -> Tensor:
        x = self.token_emb(ids)
        for (norm, block), scale in zip(self.layers, self.scales, strict=True):  # type: ignore[misc]
            x = block(norm(x)) + x * scale
        x = self.final_norm(x)
        return x if return_embeddings else self.to_logits(x)


def nano() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Nano())


def lit() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Lit(LitConfig()))


def lit_in_sequence() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Lit(LitConfig(n_query_groups=1, parallel_residual=False)))


def lit_with_one_norm() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Lit(LitConfig(n_query_groups=HEADS, shared_attention_norm=True)))


def x() -> nn.Module:
    torch.manual_seed(0)
    return perturb(X())
