"""An outer product has the norms of the matrices that it stands for."""

import torch

from dispfx.learning.hypernetwork import OuterProduct


def product(*, of_left: float = 1.0) -> OuterProduct:
    generator = torch.Generator().manual_seed(0)
    return OuterProduct(
        of_left * torch.randn(3, 5, generator=generator), torch.randn(3, 4, generator=generator)
    )


def test_the_norms_are_those_of_the_matrices():
    found = product()
    assert found.written().shape == (3, 5, 4)
    torch.testing.assert_close(found.norms(), found.written().flatten(1).norm(dim=1))


def test_the_norms_are_not_finite_where_the_matrices_are_not():
    found = product(of_left=float("inf"))
    assert not found.written().isfinite().any() and not found.norms().isfinite().any()
    nothing_by_infinity = OuterProduct(torch.zeros(1, 2), torch.full((1, 2), torch.inf))
    assert nothing_by_infinity.written().isnan().all() and nothing_by_infinity.norms().isnan().all()
