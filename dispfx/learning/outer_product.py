"""Gradients that are outer products: one matrix of rank one per group.

Legend: C matrices, W rows, F columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class OuterProduct:
    """Matrices left · rightᵀ (C, W, F), stored as two factors.

    Args:
        left_CW: contiguous.
        right_CF: contiguous.
    """

    left_CW: Tensor
    right_CF: Tensor

    def written(self) -> Tensor:
        """Return the matrices themselves, (C, W, F)."""
        return self.left_CW.unsqueeze(2) * self.right_CF.unsqueeze(1)

    def norms(self) -> Tensor:
        """Return the Frobenius norm of every matrix, (C,): the product of the norms of its factors."""
        return self.left_CW.norm(dim=1) * self.right_CF.norm(dim=1)


OuterProducts = Mapping[nn.Parameter, OuterProduct]
