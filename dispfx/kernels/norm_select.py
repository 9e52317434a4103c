"""Add a branch's output to the stream, normalise the sum, and keep the features that the next branch reads.

    total, selected = dispfx::add_norm_select(x, written, inverse, weight, bias, places, kept, eps)

    total    = x + written[inverse]
    selected = norm(total)[kept features]        statistics over the full width, only kept ones are written

A compiler makes two kernels of this, since the norm has as many elements as the stream and the selection
has not: the second reads the stream again.  Here each feature knows its place among the kept ones, so one
kernel writes both.  `reference` is what the operation means, and what runs where there is no GPU.

Shape legend: B batch, T tokens, D width, W features of the branch's output, K kept.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ADD_NORM_SELECT", "add_norm_select", "reference"]

_WIDEST = 16_384
# Programs that keep a large GPU busy, and the most tokens of one: it reads the indices once for all of them.
_PROGRAMS = 512
_MOST_TOKENS = 8


@torch.library.custom_op("dispfx::add_norm_select", mutates_args=())
def add_norm_select(
    x: Tensor,
    written: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    kept: int,
    eps: float,
    is_rms: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sum (B, T, D) and its selected norm (B, T, K), in the dtype of the stream.

    Args:
        x: (B, T, D), the stream.
        written: (B, T, W), what a branch wrote, with a column of zeros; None where nothing is added.
        inverse: (D,), for every feature its column in `written`.
        weight, bias: (D,) of the norm; a root-mean-square norm has no bias.
        places: (D,) int32, for every feature its place among the kept ones, or −1.
        kept: K.
        eps: added to the mean square or the variance.
        is_rms: whether the norm is x · rsqrt(mean(x²) + ε), rounded, · weight; else it is a LayerNorm.
    """
    return reference(x, written, inverse, weight, bias, places, kept, eps, is_rms)


@add_norm_select.register_fake
def _(
    x: Tensor,
    written: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    kept: int,
    eps: float,
    is_rms: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], kept))


@add_norm_select.register_kernel("cuda")
def _(
    x: Tensor,
    written: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    kept: int,
    eps: float,
    is_rms: bool,
) -> tuple[Tensor, Tensor]:
    if x.shape[-1] > _WIDEST or x.dtype == torch.float64:
        return reference(x, written, inverse, weight, bias, places, kept, eps, is_rms)
    return in_one_kernel(x, written, inverse, weight, bias, places, kept, eps, is_rms)


def reference(
    x: Tensor,
    written: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    kept: int,
    eps: float,
    is_rms: bool,
) -> tuple[Tensor, Tensor]:
    """As `add_norm_select`, in plain torch."""
    # An operation may not return its operand, so a sum of nothing is a copy.
    total = x.clone() if written is None or inverse is None else x + written.index_select(-1, inverse)
    if is_rms:
        whole = total.float() if total.dtype != torch.float64 else total
        scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps)
        normal = weight * scaled.to(total.dtype)
    else:
        normal = F.layer_norm(total, weight.shape, weight, bias, eps)
    order = places.argsort(stable=True)[len(places) - kept :]
    return total, normal.index_select(-1, order)


def in_one_kernel(
    x: Tensor,
    written: Tensor | None,
    inverse: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    places: Tensor,
    kept: int,
    eps: float,
    is_rms: bool,
    tokens_a_program: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `add_norm_select`, by a Triton kernel; a program takes one token, or some where there are many."""
    x = x.contiguous()
    width = x.shape[-1]
    tokens = x.numel() // width
    each = tokens_a_program or _tokens_a_program(tokens)
    added = written.contiguous() if written is not None else x
    total = torch.empty_like(x)
    selected = x.new_empty((*x.shape[:-1], kept))
    block = 1 << (width - 1).bit_length()
    with torch.cuda.device_of(x):
        _kernel()[(-(-tokens // each),)](
            x, added, inverse if inverse is not None else places,
            weight, bias if bias is not None else weight,
            places, total, selected, tokens, width, added.shape[-1], kept, eps,
            HAS_WRITTEN=written is not None, HAS_BIAS=bias is not None, IS_RMS=is_rms, EACH=each, BLOCK=block,
            num_warps=max(4, min(16, block // 512)),
        )  # fmt: skip
    return total, selected


def _tokens_a_program(tokens: int) -> int:
    """Return how many tokens one program takes: a power of two, so that few kernels are compiled."""
    most = max(1, min(_MOST_TOKENS, tokens // _PROGRAMS))
    return 1 << (most.bit_length() - 1)


@cache
def _kernel() -> Any:
    """Build the kernel; only machines with Triton come here."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def add_norm_select_rows(
        x, written, inverse, weight, bias, places, total, selected, tokens, width, columns, kept, eps,
        HAS_WRITTEN: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RMS: tl.constexpr,
        EACH: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        feature = tl.arange(0, BLOCK)
        is_feature = feature < width
        scale = tl.load(weight + feature, mask=is_feature, other=0.0).to(tl.float32)
        place = tl.load(places + feature, mask=is_feature, other=-1)
        if HAS_WRITTEN:
            column = tl.load(inverse + feature, mask=is_feature, other=0)
        if HAS_BIAS:
            shift = tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)
        for index in range(EACH):
            row = tl.program_id(0).to(tl.int64) * EACH + index
            is_there = is_feature & (row < tokens)
            value = tl.load(x + row * width + feature, mask=is_there, other=0.0)
            if HAS_WRITTEN:
                added = tl.load(written + row * columns + column, mask=is_there, other=0.0)
                # The stream is rounded before it is normalised, as where the two are apart.
                value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
            tl.store(total + row * width + feature, value, mask=is_there)
            whole = value.to(tl.float32)
            if IS_RMS:
                normal = whole * tl.rsqrt(tl.sum(whole * whole, 0) / width + eps)
                normal = normal.to(value.dtype).to(tl.float32) * scale
            else:
                mean = tl.sum(whole, 0) / width
                centred = tl.where(is_feature, whole - mean, 0.0)
                normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps) * scale
                if HAS_BIAS:
                    normal += shift
            kept_here = is_there & (place >= 0)
            tl.store(selected + row * kept + place, normal.to(value.dtype), mask=kept_here)

    return add_norm_select_rows


ADD_NORM_SELECT = torch.ops.dispfx.add_norm_select.default
