"""How far apart are two tensors of logits?

The largest absolute difference over the largest absolute value of the expected tensor.  A decoder may set
the logits of tokens that it never predicts to a large negative number, such as `finfo.min`, or add one.
Such a value says nothing about the size of all other logits, so it is compared with itself:

    error = max |a − b| / max(|b|, s)        s: largest |b| of the logits that are not masked

Without masked logits, s is the largest |b|, and the error is max |a − b| / max |b|.
"""

import math

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.words.option_names import option

# Masked logits are below this, and so many times as large as all other ones.
_MASKED_BELOW, _GAP = -100.0, 10.0


def logit_errors(expected: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the absolute and the relative difference of two tensors of one shape.

    Both are infinite if a value is not finite, and 0 if all bits are equal or there are no values.
    """
    if not (bool(expected.isfinite().all()) and bool(actual.isfinite().all())):
        return math.inf, math.inf
    if expected.numel() == 0 or torch.equal(expected, actual):
        return 0.0, 0.0
    # float64, so that the difference of two bfloat16 numbers is exact.
    difference = (expected.double() - actual.double()).abs_()
    absolute, largest, scale = float(difference.max()), largest_of(expected), unmasked_scale(expected)
    if scale == 0.0:
        return absolute, math.inf
    if scale == largest:
        return absolute, absolute / scale
    return absolute, float((difference / expected.double().abs().clamp_(min=scale)).max())


def unmasked_scale(logits: Tensor) -> float:
    """Return the largest absolute value of finite logits that are not masked."""
    largest = largest_of(logits)
    low = logits < _MASKED_BELOW
    if not bool(low.any()) or bool(low.all()):
        return largest
    scale, sizes = largest_of(logits[~low]), -logits[low]
    while len(near := sizes[sizes < _GAP * scale]):
        scale, sizes = max(scale, float(near.max())), sizes[sizes >= _GAP * scale]
    return scale if len(sizes) and scale > 0.0 else largest


def largest_of(values: Tensor) -> float:
    """Return the largest absolute value."""
    least, most = values.aminmax()
    return max(abs(float(least)), abs(float(most)))


def require_one_vocabulary(p_BRV: Tensor, q_BRV: Tensor) -> None:
    """Raise DataError if the logits of a dense and a pruned decoder differ in size."""
    if p_BRV.shape[-1] != q_BRV.shape[-1]:
        raise DataError(
            f"the decoders have vocabularies of {p_BRV.shape[-1]} and {q_BRV.shape[-1]} tokens",
            hint=f"{option('dense')} is the MODEL that the folder was compiled from",
        )
