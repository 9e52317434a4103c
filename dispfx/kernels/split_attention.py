"""Attention of one new token a sequence, with the cached places split among the processors of a GPU.

One query reads its keys and values once, so the time is that of reading them, if enough processors read at
the same time.  A batch of one has as many independent heads as the decoder, fewer than a GPU needs; so the
places in use are split into parts (Flash-Decoding, arXiv 2311.01282 section 3):

    part p:   m_p = max s,   l_p = Σ exp(s − m_p),   o_p = Σ exp(s − m_p) v / l_p       s = scale · q · kᵀ
    combined: m = max m_p,   w_p = l_p exp(m_p − m),   o = Σ w_p o_p / Σ w_p

Query heads that share a key head are rows of one product, so keys and values are read once for all of them.
How many places are in use is read from memory, so a captured CUDA graph holds for every position.

Shape legend: B batch, H query heads, G key heads, R = H / G heads a group, S places, D head size, E size
of values, P parts.
"""

# Kernels are written in Triton's own types, which a type checker takes for tuples where it finds them.
# pyright: reportOperatorIssue=false

from functools import cache
from typing import Any

import torch
from torch import Tensor

_LARGEST_HEAD = 256
_MOST_PARTS = 32
# A tile of keys is BLOCK × D; tensor cores need 16 rows of queries, and 16 columns of values.
_BLOCK = 64
_LEAST_ROWS = 16
# Programs a processor should have for its memory requests to overlap.
_PROGRAMS_A_PROCESSOR = 2
_HALF = (torch.float16, torch.bfloat16)


def can_split(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernels take these operands: one token, half precision, rows without gaps."""
    same = query.dtype == keys.dtype == values.dtype and query.dtype in _HALF
    rows = query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    sizes = query.shape[-1] == keys.shape[-1] <= _LARGEST_HEAD and values.shape[-1] <= _LARGEST_HEAD
    return query.shape[2] == 1 and same and rows and sizes


def split_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    scale: float | None = None,
    *,
    parts: int | None = None,
) -> Tensor:
    """Return the attention of one new token over the places 0 … start, (B, H, 1, E).

    Args:
        query: (B, H, 1, D).
        keys: (B, G, S, D).
        values: (B, G, S, E).
        start: () int64.
        scale: of the products; 1 / √D by default.
        parts: P, into how many parts the places are split; by default enough to fill the GPU.
    """
    batch, heads, _, size = query.shape
    groups, places = keys.shape[1], keys.shape[2]
    parts = parts or parts_for(batch * groups, places, processors(query.device))
    mixed = values.shape[-1]
    out = query.new_empty((batch, 1, heads, mixed))
    partial = query.new_empty((batch * heads, parts, mixed), dtype=torch.float32)
    weights = query.new_empty((batch * heads, parts, 2), dtype=torch.float32)
    first, second = _kernels()
    of_values = {"VALUES": mixed, "BLOCK_VALUES": max(_LEAST_ROWS, _power_of_two(mixed))}
    with torch.cuda.device_of(query):
        first[(batch * groups, parts)](
            query, keys, values, start, partial, weights, out, scale or size**-0.5,
            query.stride(0), query.stride(1),
            keys.stride(0), keys.stride(1), keys.stride(2),
            values.stride(0), values.stride(1), values.stride(2),
            groups, heads, parts,
            SIZE=size, BLOCK_SIZE=_power_of_two(size), **of_values, ROWS=heads // groups,
            BLOCK_ROWS=max(_LEAST_ROWS, _power_of_two(heads // groups)),
            BLOCK=_BLOCK, ALONE=parts == 1, num_warps=4,
        )  # fmt: skip
        if parts > 1:
            second[(batch * heads,)](
                partial, weights, out, parts,
                **of_values, BLOCK_PARTS=_power_of_two(parts), num_warps=2,
            )  # fmt: skip
    return out.transpose(1, 2)


def parts_for(independent: int, places: int, processor_count: int) -> int:
    """Return into how many parts to split, so that every processor has work and no part is tiny."""
    wanted = -(-_PROGRAMS_A_PROCESSOR * processor_count // independent)
    return max(1, min(wanted, places // (2 * _BLOCK), _MOST_PARTS))


def processors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 1 for anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@cache
def _kernels() -> tuple[Any, Any]:
    """Build the two kernels; only machines with Triton come here."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    @triton.jit
    def read_part(
        query, keys, values, start, partial, weights, out, scale,
        query_batch, query_head,
        keys_batch, keys_head, keys_place,
        values_batch, values_head, values_place,
        groups, heads, parts,
        SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr,
        ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, ALONE: tl.constexpr,
    ):  # fmt: skip
        sequence = (tl.program_id(0) // groups).to(tl.int64)
        group = tl.program_id(0) % groups
        part = tl.program_id(1)
        used = tl.load(start).to(tl.int32) + 1
        blocks = tl.cdiv(tl.cdiv(used, BLOCK), parts)
        begin = part * blocks * BLOCK
        end = tl.minimum(begin + blocks * BLOCK, used)

        rows = tl.arange(0, BLOCK_ROWS)
        features = tl.arange(0, BLOCK_SIZE)
        is_row = rows < ROWS
        is_feature = features < SIZE
        mixes = tl.arange(0, BLOCK_VALUES)
        is_mixed = mixes < VALUES
        head = group * ROWS + rows
        at = query + sequence * query_batch + head[:, None] * query_head + features[None, :]
        q = tl.load(at, mask=is_row[:, None] & is_feature[None, :], other=0.0)

        # 1.4427 = log₂ e: exponentials are taken with base two.
        factor = scale * 1.4426950408889634
        highest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_ROWS,), tl.float32)
        mixed = tl.zeros((BLOCK_ROWS, BLOCK_VALUES), tl.float32)
        keys += sequence * keys_batch + group * keys_head
        values += sequence * values_batch + group * values_head
        for first in range(begin, end, BLOCK):
            places = first + tl.arange(0, BLOCK)
            is_used = places < end
            k = tl.load(
                keys + places[None, :].to(tl.int64) * keys_place + features[:, None],
                mask=is_used[None, :] & is_feature[:, None],
                other=0.0,
            )
            v = tl.load(
                values + places[:, None].to(tl.int64) * values_place + mixes[None, :],
                mask=is_used[:, None] & is_mixed[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k) * factor
            scores = tl.where(is_used[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            shares = tl.exp2(scores - higher[:, None])
            faded = tl.exp2(highest - higher)
            total = total * faded + tl.sum(shares, 1)
            mixed = mixed * faded[:, None] + tl.dot(shares.to(v.dtype), v)
            highest = higher

        # A part after the last used place has seen nothing: its weight is zero.
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        is_value = is_row[:, None] & is_mixed[None, :]
        row = sequence * heads + head
        if ALONE:
            tl.store(
                out + row[:, None] * VALUES + mixes[None, :], mixed.to(out.dtype.element_ty), mask=is_value
            )
        else:
            slot = row * parts + part
            tl.store(partial + slot[:, None] * VALUES + mixes[None, :], mixed, mask=is_value)
            tl.store(weights + slot * 2, highest, mask=is_row)
            tl.store(weights + slot * 2 + 1, total, mask=is_row)

    @triton.jit
    def combine(
        partial, weights, out, parts,
        VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        part = tl.arange(0, BLOCK_PARTS)
        mixes = tl.arange(0, BLOCK_VALUES)
        is_part = part < parts
        is_mixed = mixes < VALUES
        slot = row * parts + part
        highest = tl.load(weights + slot * 2, mask=is_part, other=float("-inf"))
        total = tl.load(weights + slot * 2 + 1, mask=is_part, other=0.0)
        weight = total * tl.exp2(highest - tl.max(highest, 0))
        mixed = tl.load(
            partial + slot[:, None] * VALUES + mixes[None, :],
            mask=is_part[:, None] & is_mixed[None, :],
            other=0.0,
        )
        result = tl.sum(weight[:, None] * mixed, 0) / tl.sum(weight, 0)
        tl.store(out + row * VALUES + mixes, result.to(out.dtype.element_ty), mask=is_mixed)

    return read_part, combine
