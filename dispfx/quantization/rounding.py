"""Round the weight of a product to a grid, so that its results on a text change as little as possible.

    y = x Wᵀ   →   y = x Qᵀ        Q[n, k] = scale[n, g] · (code[n, k] − zero[n, g]),  g = k // group

Rules:
1. Every group of inputs has a scale and a zero point of its own for each output.  They are those of the
   group's smallest and largest number, made narrower where that lowers the error of the rounded numbers,
   each weighed by the mean square of its input.
2. Columns are rounded one after the other, the one with the largest mean square first, and what this changes
   in the results is made up for in the columns that are not rounded yet (GPTQ, arXiv 2210.17323, with the
   columns in this order and scales that are chosen before).
3. The error is trace((W − Q) H (W − Q)ᵀ) with the second moments H of the inputs.  Where rounding to
   nearest has a smaller one, it is taken.

Shape legend: N outputs, K inputs, G groups of a row, S inputs of a group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Ranges that are tried, as a part of the whole one (rule 1).
_NARROWER = torch.linspace(1.0, 0.7, 13).tolist()
# Added to the diagonal of the second moments, as a part of its mean, so that they can be inverted.
_DAMPING = 0.01
# Columns whose changes are carried over to the others at once.
_BLOCK = 64
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Grid:
    """Which numbers a weight may have.

    Args:
        bits: of a code.
        group: inputs that share a scale; None for all of an output.
        symmetric: whether the zero point is the middle code everywhere.
        floating: whether codes are floating-point numbers (float8 with 4 bits of exponent) around 0.
        scales: dtype in which scales are kept.
    """

    bits: int
    group: int | None = None
    symmetric: bool = False
    floating: bool = False
    scales: torch.dtype = torch.float32

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 0 if self.floating else 2 ** (self.bits - 1)

    def of_groups(self, width: int) -> int:
        """Return the inputs that share a scale in a weight of K = `width` inputs."""
        return width if self.group is None else self.group

    def codes(self, numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest codes, as float32."""
        if self.floating:
            largest = torch.finfo(FLOAT8).max
            return (numbers / scales).clamp(-largest, largest).to(FLOAT8).float()
        return (numbers / scales + zeros).round().clamp(0, 2**self.bits - 1)

    def kept(self, codes: Tensor) -> Tensor:
        """Return codes in the dtype in which they are kept, of one byte."""
        return codes.to(FLOAT8 if self.floating else torch.uint8)

    def ranges(self, groups: Tensor, part: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scales and zero points (N, G) that cover a part of the range of groups (N, G, S)."""
        low, high = groups.amin(-1).clamp(max=0) * part, groups.amax(-1).clamp(min=0) * part
        if self.floating:
            scales = torch.maximum(-low, high) / torch.finfo(FLOAT8).max
        elif self.symmetric:
            scales = torch.maximum(-low / self.middle, high / (self.middle - 1))
        else:
            scales = (high - low) / (2**self.bits - 1)
        scales = scales.to(self.scales).float()
        scales = torch.where(scales > 0, scales, 1.0)
        if self.floating or self.symmetric:
            return scales, torch.full_like(scales, self.middle)
        return scales, (-low / scales).round().clamp(0, 2**self.bits - 1)


@dataclass(frozen=True, eq=False)
class Rounded:
    """A weight on a grid.

    Args:
        codes: (N, K) uint8, or float8 of a floating grid.
        scales: (N, G) float32.
        zeros: (N, G) float32, the zero points, whole numbers.
        group: inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    @property
    def numbers(self) -> Tensor:
        """The weight (N, K), float32."""
        groups = torch.arange(self.codes.shape[1], device=self.codes.device) // self.group
        return (self.codes.float() - self.zeros[:, groups]) * self.scales[:, groups]

    def with_zeros(self, count: int) -> "Rounded":
        """Return the weight with so many further outputs that are zero."""
        codes, zeros = (F.pad(one, (0, 0, 0, count)) for one in (self.codes, self.zeros))
        return Rounded(codes, F.pad(self.scales, (0, 0, 0, count), value=1.0), zeros, self.group)


def to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """Round every number of a weight (N, K) float32 to the nearest one of its grid."""
    return _nearest(weight, *grid.ranges(_in_groups(weight, grid.of_groups(weight.shape[1]))), grid)


def rounded(weight: Tensor, moments: Tensor, grid: Grid) -> Rounded:
    """Round a weight so that its results change least (rules 1 to 3).

    Args:
        weight: (N, K) float32.
        moments: (K, K) float32, of the inputs of a text.
        grid: of the result.
    """
    scales, zeros = _chosen(weight, moments.diagonal(), grid)
    found = _one_after_the_other(weight, moments, scales, zeros, grid), to_nearest(weight, grid)
    return min(found, key=lambda one: error(weight, one.numbers, moments))


def error(weight: Tensor, changed: Tensor, moments: Tensor) -> float:
    """Return the mean square of what another weight changes in the results, summed over outputs (rule 3)."""
    change = weight - changed
    return float(((change @ moments) * change).sum())


def _in_groups(weight: Tensor, size: int) -> Tensor:
    """Return a weight as (N, G, S), filled up with zeros, which every grid has."""
    return F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))


def _chosen(weight: Tensor, squares: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points with the least weighed error (rule 1)."""
    size = grid.of_groups(weight.shape[1])
    groups, weights = _in_groups(weight, size), _in_groups(squares[None], size)
    best = scales, zeros = grid.ranges(groups)
    least = torch.full_like(scales, torch.inf)
    for part in _NARROWER:
        scales, zeros = grid.ranges(groups, part)
        codes = grid.codes(groups, scales[..., None], zeros[..., None])
        change = groups - (codes - zeros[..., None]) * scales[..., None]
        found = (change.square() * weights).sum(-1)
        better = found < least
        best = torch.where(better, scales, best[0]), torch.where(better, zeros, best[1])
        least = torch.minimum(least, found)
    return best


def _nearest(weight: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Rounded:
    size = grid.of_groups(weight.shape[1])
    groups = torch.arange(weight.shape[1], device=weight.device) // size
    codes = grid.codes(weight, scales[:, groups], zeros[:, groups])
    return Rounded(grid.kept(codes), scales, zeros, size)


def _one_after_the_other(
    weight: Tensor, moments: Tensor, scales: Tensor, zeros: Tensor, grid: Grid
) -> Rounded:
    """Round the columns in the order of their inputs' mean squares (rule 2)."""
    size = grid.of_groups(weight.shape[1])
    order = moments.diagonal().argsort(descending=True)
    upper = _upper(moments[order][:, order])
    left, groups = weight[:, order].clone(), order // size
    scale, zero = scales[:, groups], zeros[:, groups]
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        end = min(start + _BLOCK, left.shape[1])
        changes = torch.empty_like(left[:, start:end])
        for at in range(start, end):
            column = left[:, at]
            code = grid.codes(column, scale[:, at], zero[:, at])
            change = (column - (code - zero[:, at]) * scale[:, at]) / upper[at, at]
            left[:, at:end] -= change[:, None] * upper[at, at:end]
            codes[:, at], changes[:, at - start] = code, change
        left[:, end:] -= changes @ upper[start:end, end:]
    return Rounded(grid.kept(codes[:, order.argsort()]), scales, zeros, size)


def _upper(moments: Tensor) -> Tensor:
    """Return the upper triangle U with UᵀU = (H + damping)⁻¹."""
    exact = moments.double()
    damping = _DAMPING * exact.diagonal().mean()
    # Inputs that are always zero have no say.
    damping = torch.where(damping > 0, damping, 1.0)
    exact = exact + damping * torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(exact))
    return torch.linalg.cholesky(inverse, upper=True).to(moments.dtype)
