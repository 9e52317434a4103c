"""Print how far the Triton kernels are from the reference, for several shapes, as JSON."""

import json

import torch

from dispfx.kernels.cached_attention import reference
from dispfx.kernels.norm_gate import apart_from_reference
from dispfx.kernels.norm_select import in_one_kernel
from dispfx.kernels.norm_select import reference as norm_reference
from dispfx.kernels.split_attention import split_attention

# batch, query heads, key heads, places, head size, last place in use, parts
SHAPES = [
    (1, 4, 4, 300, 64, 0, 4),
    (2, 8, 2, 300, 128, 199, 4),
    (2, 4, 4, 256, 80, 255, 1),
    (1, 6, 2, 1024, 128, 700, 8),
    (2, 2, 2, 70, 16, 3, 1),
    (1, 3, 1, 200, 40, 130, 3),
]


def error(batch: int, heads: int, groups: int, places: int, size: int, start: int, parts: int) -> float:
    """Return max|a − b| / max|b| of random operands in half precision."""
    torch.manual_seed(places)
    query = torch.randn(batch, 1, heads, size).half().transpose(1, 2)
    keys, values = (torch.randn(batch, groups, places, size).half() for _ in range(2))
    at = torch.tensor(start)
    actual = split_attention(query, keys, values, at, parts=parts).float()
    expected = reference(query.float(), keys.float(), values.float(), at)
    return float((actual - expected).abs().max() / expected.abs().max())


CPU = torch.device("cpu")
# widths
GATES = [40, 64]

# width, features of the branch, kept
NORMS = [(96, 33, 41), (40, 9, 1), (64, 65, 64)]


def norm_errors(width: int, columns: int, kept: int) -> list[float]:
    """Return max|a − b| / max|b| of write, norm and selection, for both norms, with and without a write."""
    torch.manual_seed(width)
    x, written = torch.randn(2, 3, width), torch.randn(2, 3, columns)
    weight, bias = torch.randn(2, width)
    inverse = torch.randint(columns, (width,), dtype=torch.int32)
    places = torch.full((width,), -1, dtype=torch.int32)
    places[torch.randperm(width)[:kept].sort().values] = torch.arange(kept, dtype=torch.int32)
    errors = []
    for is_rms in (True, False):
        for added, columns_of in ((written, inverse), (None, None)):
            taken = (x, added, columns_of, weight, None if is_rms else bias, places, kept, 1e-5, is_rms)
            for each in (1, 4):  # of six tokens: the second program of four has two
                pairs = zip(in_one_kernel(*taken, each), norm_reference(*taken), strict=True)
                errors += [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return errors


if __name__ == "__main__":
    norms = [value for norm in NORMS for value in norm_errors(*norm)]
    gates = [value for width in GATES for value in apart_from_reference(CPU, torch.float32, width)]
    attention = [error(*shape) for shape in SHAPES]
    print(json.dumps({"attention": attention, "norms": norms, "gates": gates}))
