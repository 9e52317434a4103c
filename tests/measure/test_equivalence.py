import math

import pytest
import torch
from torch import Tensor

from dispfx.errors import VerificationError
from dispfx.verification.equivalence import (
    SHAPES_BT,
    Verification,
    compare,
    compare_decoders,
    random_token_ids,
    require,
)


def test_the_metric_is_the_largest_difference_over_the_largest_expected_value() -> None:
    expected = torch.tensor([[[1.0, -4.0], [0.5, 0.0]]])
    actual = torch.tensor([[[1.5, -4.25], [0.5, 0.0]]])

    found = compare("b = a", expected, actual, 0.125)

    assert (found.max_abs_error, found.max_rel_error) == (0.5, 0.125)
    assert found.shape == (1, 2)
    assert found.holds
    assert not compare("b = a", expected, actual, 0.1249).holds


def test_the_expected_side_sets_the_scale() -> None:
    small, large = torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 10.0)

    assert compare("x", small, large, 1.0).max_rel_error == 9.0
    assert compare("x", large, small, 1.0).max_rel_error == 0.9


def test_equal_bits_hold_at_tolerance_zero_and_one_bit_of_difference_does_not() -> None:
    logits = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    other = logits.clone()
    other[1, 2, 3] = torch.nextafter(other[1, 2, 3], torch.tensor(2.0))

    assert compare("same", logits, logits.clone(), 0.0).holds
    assert not compare("one bit", logits, other, 0.0).holds


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sides", ["expected", "actual", "both"])
def test_a_value_that_is_not_finite_never_holds(bad: float, sides: str) -> None:
    expected, actual = torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    if sides != "actual":
        expected[0, 0, 0] = bad
    if sides != "expected":
        actual[0, 0, 0] = bad

    found = compare("x", expected, actual, 1e9)

    assert not found.holds
    with pytest.raises(VerificationError):
        require(found)


def test_nan_in_a_report_line_never_holds() -> None:
    assert not Verification("x", (1, 1), math.nan, math.nan, 1.0).holds


def test_all_zero_logits_hold_only_against_zeros() -> None:
    zeros = torch.zeros(1, 2, 3)

    assert compare("x", zeros, zeros.clone(), 0.0).holds
    assert not compare("x", zeros, zeros + 1e-30, 1e6).holds


def test_bfloat16_is_compared_without_rounding_the_difference() -> None:
    expected = torch.tensor([[[256.0]]], dtype=torch.bfloat16)
    actual = torch.tensor([[[-1.0078125]]], dtype=torch.bfloat16)

    assert compare("x", expected, actual, 1.0).max_abs_error == 257.0078125


@pytest.mark.parametrize(
    "actual", [torch.zeros(1, 2, 4), torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(2, 3)]
)
def test_another_shape_or_dtype_is_an_error_that_says_both(actual: Tensor) -> None:
    with pytest.raises(VerificationError) as error:
        compare("onnx = lowered", torch.zeros(1, 2, 3), actual, 1.0)

    assert "(1, 2, 3)" in str(error.value)
    assert str(tuple(actual.shape)) in str(error.value)
    assert str(actual.dtype) in str(error.value)
    assert "onnx = lowered" in str(error.value)


def test_require_names_the_worst_comparison() -> None:
    good = Verification("good", (2, 9), 0.0, 0.0, 0.0)
    bad = Verification("bad", (2, 9), 0.1, 0.01, 1e-6)
    worse = Verification("worse", (1, 17), 3.0, 0.5, 1e-6)

    require(good)
    require()
    with pytest.raises(VerificationError) as error:
        require(good, bad, worse)

    assert "worse: relative error 0.5" in str(error.value)
    assert "(1, 17)" in str(error.value)
    assert "2 of 3" in str(error.value)
    assert error.value.exit_code == 1


def test_random_token_ids_depend_on_seed_and_shape_only() -> None:
    state = torch.get_rng_state()
    ids_BT = random_token_ids(50, (3, 40), seed=7)

    assert ids_BT.dtype == torch.int64
    assert torch.equal(ids_BT, random_token_ids(50, (3, 40), seed=7))
    assert not torch.equal(ids_BT, random_token_ids(50, (3, 40), seed=8))
    assert int(ids_BT.min()) >= 0 and int(ids_BT.max()) < 50
    assert torch.equal(state, torch.get_rng_state())


def test_decoders_are_compared_at_every_shape() -> None:
    def expected(ids_BT: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids_BT, 11).double()

    def fixed_to_length_nine(ids_BT: Tensor) -> Tensor:
        logits_BTV = expected(ids_BT)
        logits_BTV[:, 9:] = 0.0
        return logits_BTV

    found = compare_decoders("x", expected, fixed_to_length_nine, 1e-6, vocabulary_size=11)

    assert [line.shape for line in found] == list(SHAPES_BT)
    assert [line.holds for line in found] == [True, False]
