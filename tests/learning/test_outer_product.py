"""An outer product has the norms of the matrices that it stands for."""

import pytest
import torch

from dispfx.learning.hypernetwork import OuterProduct


def product(knots: int, *, of_left: float = 1.0) -> OuterProduct:
    generator = torch.Generator().manual_seed(0)
    return OuterProduct(
        of_left * torch.randn(knots, 3, 5, generator=generator), torch.randn(knots, 3, 4, generator=generator)
    )


@pytest.mark.parametrize("knots", [1, 4])
def test_the_matrices_are_sums_over_knots_and_the_norms_theirs(knots: int):
    found = product(knots)
    expected = torch.einsum("kcw,kcf->cwf", found.left_KCW, found.right_KCF)
    torch.testing.assert_close(found.written(), expected)
    torch.testing.assert_close(found.norms(), expected.flatten(1).norm(dim=1))


@pytest.mark.parametrize("knots", [1, 4])
def test_the_norms_are_not_finite_where_the_matrices_are_not(knots: int):
    found = product(knots, of_left=float("inf"))
    assert not found.written().isfinite().any() and not found.norms().isfinite().any()
    nothing_by_infinity = OuterProduct(torch.zeros(knots, 1, 2), torch.full((knots, 1, 2), torch.inf))
    assert nothing_by_infinity.written().isnan().all() and nothing_by_infinity.norms().isnan().all()
