"""Round a weight to a grid, so that the layer's results on calibration data change as little as possible.

    y = x Wᵀ   →   y = x Qᵀ        Q[n, k] = scale[n, g] · (code[n, k] − zero[n, g]),  g = k // group

Rules:
1. Every group of inputs has a scale and a zero point per output.  They cover the range of the group's
   numbers, or a part of it if that lowers the squared error of the rounded numbers, weighted by the mean
   squares of their inputs.
2. Columns are rounded one after another, starting with the largest mean square of its input.  The error of a
   column is compensated in the columns that are not rounded yet (GPTQ, arXiv 2210.17323).  Scales are chosen
   before any column is rounded.
3. The error of a weight is trace((W − Q) H (W − Q)ᵀ) with the second moments H of the inputs.  If rounding to
   nearest has a smaller error, its result is used.

Shape legend: N outputs, K inputs, G groups of a row, S inputs of a group.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Ranges to try, as shares of the full range (rule 1).
_NARROWER = torch.linspace(1.0, 0.7, 13).tolist()
# Added to the diagonal of the second moments, as a share of its mean, so that they can be inverted.
_DAMPING = 0.01
# Columns per block.  Later blocks get the errors of a block in one product.
_BLOCK = 64
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Grid:
    """Which numbers a weight may have.

    Args:
        bits: of a code.
        group: inputs that share a scale; None if all inputs of an output do.
        symmetric: whether the zero point is the middle code everywhere.
        floating: whether codes are floating-point numbers (float8 with 4 bits of exponent) around 0.
        scales: dtype in which scales are stored; they are rounded to it.
    """

    bits: int
    group: int | None = None
    symmetric: bool = False
    floating: bool = False
    scales: torch.dtype = torch.float32

    @property
    def near(self) -> float:
        """Largest norm(rounded − weight) / norm(weight) of a sound rounding.

        Numbers rounded to nearest give about a quarter of it; an unrelated weight of the same norm gives 1.4.
        """
        return 0.4 if self.bits == 4 else 0.1 if self.floating else 0.05

    @property
    def middle(self) -> int:
        """The zero point of a symmetric grid."""
        return 0 if self.floating else 2 ** (self.bits - 1)

    def of_groups(self, width: int) -> int:
        """Return how many inputs share a scale in a weight of K = `width` inputs."""
        return width if self.group is None else self.group

    def codes(self, numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the nearest codes, as float32."""
        if self.floating:
            largest = torch.finfo(FLOAT8).max
            return (numbers / scales).clamp(-largest, largest).to(FLOAT8).float()
        return (numbers / scales + zeros).round().clamp(0, 2**self.bits - 1)

    def kept(self, codes: Tensor) -> Tensor:
        """Return codes in the dtype in which `Rounded` holds them, of one byte."""
        return codes.to(FLOAT8 if self.floating else torch.uint8)

    def ranges(self, groups: Tensor, part: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scales and zero points (N, G) for a share, `part`, of the range of groups (N, G, S)."""
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
        """Return the weight with `count` more outputs, which are zero."""
        codes, zeros = (F.pad(one, (0, 0, 0, count)) for one in (self.codes, self.zeros))
        return Rounded(codes, F.pad(self.scales, (0, 0, 0, count), value=1.0), zeros, self.group)


def to_nearest(weight: Tensor, grid: Grid) -> Rounded:
    """Round every number of a weight (N, K) float32 to the nearest number of the grid."""
    return _nearest(weight, *grid.ranges(_in_groups(weight, grid.of_groups(weight.shape[1]))), grid)


def rounded(weight: Tensor, moments: Tensor, grid: Grid) -> Rounded:
    """Round a weight so that the layer's results change little (rules 1 to 3).

    Args:
        weight: (N, K) float32.
        moments: (K, K) float32, second moments of the inputs.
        grid: of the result.
    """
    scales, zeros = _chosen(weight, moments.diagonal(), grid)
    found = _one_after_the_other(weight, moments, scales, zeros, grid), to_nearest(weight, grid)
    return min(found, key=lambda one: error(weight, one.numbers, moments))


def error(weight: Tensor, changed: Tensor, moments: Tensor) -> float:
    """Return the mean square change of the results by a changed weight, summed over outputs (rule 3)."""
    change = weight - changed
    return float(((change @ moments) * change).sum())


def _in_groups(weight: Tensor, size: int) -> Tensor:
    """Return a weight as (N, G, S), padded with zeros, which every grid has."""
    return F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))


def _chosen(weight: Tensor, squares: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the scales and zero points with the least weighted error (rule 1)."""
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
    # If all inputs are zero, so is the mean.
    damping = torch.where(damping > 0, damping, 1.0)
    exact = exact + damping * torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(exact))
    return torch.linalg.cholesky(inverse, upper=True).to(moments.dtype)
