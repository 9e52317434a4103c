"""Print how far the Triton kernels are from the reference, for several shapes, as JSON."""

import json

import torch

from dispfx.kernels.cached_attention import reference
from dispfx.kernels.split_attention import split_attention

# batch, query heads, key heads, places, head size, last place in use, parts, and the size of other values
SHAPES = [
    (1, 4, 4, 300, 64, 0, 4),
    (2, 8, 2, 300, 128, 199, 4),
    (2, 4, 4, 256, 80, 255, 1),
    (1, 6, 2, 1024, 128, 700, 8),
    (2, 2, 2, 70, 16, 3, 1),
    (1, 3, 1, 200, 40, 130, 3),
    (2, 8, 2, 300, 128, 199, 4, 80),
    (2, 4, 4, 256, 80, 255, 1, 8),
    (1, 6, 2, 300, 32, 199, 3, 48),
]


def error(
    batch: int, heads: int, groups: int, places: int, size: int, start: int, parts: int, mixed: int = 0
) -> float:
    """Return max|a − b| / max|b| of random operands in half precision."""
    torch.manual_seed(places)
    query = torch.randn(batch, 1, heads, size).half().transpose(1, 2)
    keys, values = (torch.randn(batch, groups, places, one).half() for one in (size, mixed or size))
    at = torch.tensor(start)
    actual = split_attention(query, keys, values, at, parts=parts).float()
    expected = reference(query.float(), keys.float(), values.float(), at)
    return float((actual - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    print(json.dumps({"attention": [error(*shape) for shape in SHAPES]}))
