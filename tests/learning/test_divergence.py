"""The divergence of two decoders: its value and gradients are those of a whole computation in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dispfx.errors import DataError
from dispfx.learning.divergence import Predictions, kl_divergence, stream_distance


def whole(teacher_BTV: Tensor, student_BTV: Tensor, where_BT: Tensor) -> Tensor:
    p, q = (functional.log_softmax(one.double(), -1) for one in (teacher_BTV, student_BTV))
    return (p.exp() * (p - q)).sum(-1)[where_BT].mean()


def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = torch.randn(2, 7, 5), torch.randn(2, 7, 3, requires_grad=True)
    return x, y, torch.randn(11, 5), torch.randn(11, 3, requires_grad=True)


@pytest.mark.parametrize("rows", [None, 1, 4, 14, 50])
def test_value_and_gradients_are_those_of_the_whole_in_any_chunks(rows: int | None):
    x, y, wide, narrow = heads()
    where = torch.rand(2, 7) < 0.6
    expected = whole(x @ wide.T, y @ narrow.T, where)
    slopes = torch.autograd.grad(3 * expected, (y, narrow))

    found = kl_divergence(
        Predictions(x, lambda part: part @ wide.T),
        Predictions(y, lambda part: part @ narrow.T, (narrow,)),
        where,
        rows=rows,
    )
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-5)
    (3 * found).backward()
    for tensor, slope in zip((y, narrow), slopes, strict=True):
        assert tensor.grad is not None
        assert torch.allclose(tensor.grad, slope.float(), rtol=1e-4, atol=1e-6)


def test_logits_themselves_do_and_the_teacher_gets_no_gradient():
    teacher, student = (torch.randn(2, 3, 9, requires_grad=True) for _ in range(2))
    found = kl_divergence(Predictions(teacher), Predictions(student))
    expected = whole(teacher, student, torch.ones(2, 3, dtype=torch.bool))
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    assert teacher.grad is None and student.grad is not None
    assert kl_divergence(Predictions(teacher), Predictions(teacher.detach())).item() == 0.0


def test_a_frozen_head_and_no_gradient_keep_nothing():
    x, y, wide, narrow = heads()
    student = Predictions(y.detach(), lambda part: part @ narrow.T)
    assert not kl_divergence(Predictions(x, lambda part: part @ wide.T), student).requires_grad


def test_tokens_that_cannot_come_count_as_nothing():
    teacher, student = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4, requires_grad=True)
    teacher[..., 3] = -torch.inf
    found = kl_divergence(Predictions(teacher), Predictions(student))
    assert found.item() == pytest.approx(torch.tensor(4 / 3).log().item(), rel=1e-6)
    found.backward()
    assert student.grad is not None and bool(student.grad.isfinite().all())


def test_other_vocabularies_are_refused():
    with pytest.raises(DataError, match="vocabularies of 4 and 5 tokens"):
        kl_divergence(Predictions(torch.zeros(1, 2, 4)), Predictions(torch.zeros(1, 2, 5)))


def streams(*shape: int) -> tuple[list[Tensor], list[Tensor]]:
    teacher = [torch.randn(*shape) for _ in range(3)]
    return teacher, [(one + 0.1 * torch.randn(*shape)).requires_grad_() for one in teacher]


def with_stream(values: list[Tensor]) -> Predictions:
    return Predictions(torch.zeros(1, 1, 1), stream=tuple(values))


def test_the_distance_of_two_streams_and_its_gradient_are_those_of_float64():
    teacher, student = streams(2, 5, 7)
    wide = [(t.double(), s.detach().double().requires_grad_()) for t, s in zip(teacher, student, strict=True)]
    ratios = [((s - t).square().sum(-1) / t.square().sum(-1)) for t, s in wide]
    expected = torch.stack(ratios).mean()
    expected.backward()
    found = stream_distance(with_stream(teacher), with_stream(student))
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-5)
    (3 * found).backward()
    for one, (_, precise) in zip(student, wide, strict=True):
        assert one.grad is not None and precise.grad is not None
        torch.testing.assert_close(one.grad, (3 * precise.grad).float(), rtol=1e-4, atol=1e-7)


def test_equal_streams_have_no_distance_and_a_token_at_zero_counts_as_nothing():
    teacher, student = streams(1, 4, 6)
    assert stream_distance(with_stream(teacher), with_stream(teacher)).item() == 0.0
    teacher[0][0, 1] = 0.0
    found = stream_distance(with_stream(teacher[:1]), with_stream(student[:1]))
    difference = (student[0] - teacher[0]).square().sum(-1)[0]
    kept = [0, 2, 3]
    expected = (difference[kept] / teacher[0].square().sum(-1)[0, kept]).sum() / 4
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    assert student[0].grad is not None and not bool(student[0].grad[0, 1].any())


@pytest.mark.parametrize("other", [[], [torch.zeros(1, 2, 4)], [torch.zeros(1, 2, 3)] * 2])
def test_streams_of_other_widths_or_numbers_are_refused(other: list[Tensor]):
    with pytest.raises(DataError, match="cannot be compared"):
        stream_distance(with_stream([torch.ones(1, 2, 3)]), with_stream(other))
    with pytest.raises(DataError, match="cannot be compared"):
        stream_distance(with_stream([]), with_stream([]))
