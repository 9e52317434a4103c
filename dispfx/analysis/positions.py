"""Which positions of a dimension stay when features go, and tensors cut by them.

Shapes: N features of a site, E experts with features of their own, P positions of an axis, K that stay.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from dispfx.errors import PassError
from dispfx.ir.sites import UNTOUCHED, Site


def kept_features(site: Site, kept: Tensor) -> np.ndarray:
    """Return for every feature whether it is kept: (N,), or (E, N / E) where stacked experts have their own.

    Raises:
        PassError: if experts, or heads, keep unlike numbers, so that no tensor could hold what is left.
    """
    mask = np.zeros(site.size, dtype=bool)
    mask[kept.numpy()] = True
    if site.experts == 1:
        return mask
    mask_EI = mask.reshape(site.experts, site.per_expert)
    numbers = mask_EI.sum(axis=1)
    if (numbers != numbers[0]).any():
        raise PassError(
            f"experts must keep equally many features, and keep {numbers.tolist()}", where=site.name
        )
    return mask_EI if site.is_stacked else mask


def kept_positions(labels: np.ndarray | tuple[int, ...] | None, mask: np.ndarray) -> np.ndarray:
    """Return for each position of an axis whether it stays: it follows no feature, or a kept one.

    Args:
        labels: (P,), the feature that each follows, or `UNTOUCHED`; None where position i follows feature i.
            (H, P) where heads, which have a dimension of their own, have other features.
        mask: (N,), or (E, N / E); the result is (P,), (H, P) or (E, P).
    """
    if labels is None:
        return mask
    follows = np.asarray(labels)
    return (follows == UNTOUCHED) | mask[..., np.maximum(follows, 0)]


def kept_by_all(cuts: Iterable[tuple[np.ndarray | tuple[int, ...] | None, np.ndarray]]) -> np.ndarray:
    """Return for each position of an axis whether it stays, (P,), if several sites cut it.

    Args:
        cuts: labels and mask of each site, as for `kept_positions`, one at least.
    """
    return np.logical_and.reduce([kept_positions(labels, mask) for labels, mask in cuts])


def places(stays: np.ndarray) -> np.ndarray:
    """Return the positions that stay, in order: (K,) of (P,), or (E, K) of (E, P) with K in each row."""
    if stays.ndim == 1:
        return np.flatnonzero(stays)
    return np.nonzero(stays)[1].reshape(len(stays), -1)


def taken(tensor: Tensor, axis: int, positions: np.ndarray) -> Tensor:
    """Return a tensor's positions of one axis: the same ones (K,), or (E, K) for each matrix of a stack."""
    return _by_matrix(tensor, axis, positions, Tensor.index_select)


def zeroed(tensor: Tensor, axis: int, positions: np.ndarray) -> Tensor:
    """Return a tensor with zeros at positions of one axis: the same ones, or others for each matrix."""
    return _by_matrix(tensor, axis, positions, lambda part, dim, index: part.index_fill(dim, index, 0))


def _by_matrix(
    tensor: Tensor, axis: int, positions: np.ndarray, change: Callable[[Tensor, int, Tensor], Tensor]
) -> Tensor:
    index = torch.from_numpy(np.ascontiguousarray(positions)).to(tensor.device)
    if index.dim() == 1:
        return change(tensor, axis, index)
    return torch.stack([change(part, axis - 1, own) for part, own in zip(tensor, index, strict=True)])
