import math

import pytest
import torch
from torch import Tensor, nn

from dispfx.errors import VerificationError
from dispfx.verification.equivalence import (
    IN_FLOAT32,
    SHAPES_BT,
    ModuleDecoder,
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


class Wide(nn.Module):
    """A decoder whose sums depend on the order of its features."""

    def __init__(self, order: Tensor, loud: float = 1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(16, 512, generator=generator))
        self.inner = nn.Parameter(loud * torch.randn(512, 512, generator=generator))
        self.head = nn.Parameter(torch.randn(16, 512, generator=generator))
        self.order = order

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        for _ in range(4):
            x = (x[..., self.order].unsqueeze(-2) * self.inner[:, self.order]).cumsum(-1)[..., -1]
        return x @ self.head.T


def lines_of(actual: nn.Module, dtype: torch.dtype, loud: float = 1.0, tolerance: float = 5e-2):
    expected = Wide(torch.arange(512), loud).to(dtype)
    return compare_decoders(
        "b = a", expected, actual.to(dtype), tolerance, vocabulary_size=16, shapes=[(1, 2)]
    )


@pytest.mark.parametrize("of_module", [False, True])
def test_half_precision_is_compared_in_float32(of_module: bool) -> None:
    other = Wide(torch.arange(512).flip(0))
    actual: nn.Module = ModuleDecoder(other) if of_module else other

    (line,) = lines_of(actual, torch.bfloat16)

    assert line.name == "b = a" + IN_FLOAT32
    assert line.holds and line.max_rel_error < 1e-5 and line.tolerance == 1e-4


def test_a_fault_below_the_rounding_of_half_precision_is_found() -> None:
    wrong = Wide(torch.arange(512))
    with torch.no_grad():
        wrong.head[3, 5] += 0.25

    (line,) = lines_of(wrong, torch.bfloat16)

    assert not line.holds and line.max_rel_error < 5e-2


def test_equal_bits_and_decoders_that_are_no_modules_stay_in_half_precision() -> None:
    same = Wide(torch.arange(512))

    assert lines_of(same, torch.bfloat16, tolerance=0.0)[0].name == "b = a"
    expected = same.to(torch.bfloat16)
    found = compare_decoders(
        "b = a", expected, lambda ids: expected(ids), 5e-2, vocabulary_size=16, shapes=[(1, 2)]
    )
    assert found[0].name == "b = a"


def test_what_overflows_in_half_precision_never_holds() -> None:
    (line,) = lines_of(Wide(torch.arange(512), 1e3), torch.float16, loud=1e3)

    assert line.name == "b = a" and not line.holds


def test_without_room_for_float32_half_precision_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispfx.verification.equivalence.free_bytes", lambda device: 1000)

    (line,) = lines_of(Wide(torch.arange(512)), torch.bfloat16)

    assert line.name == "b = a" and line.holds


class Cast(Wide):
    """Casts to half precision by itself, so that it is another function in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids].bfloat16().to(self.inner.dtype)
        return (x[..., self.order].bfloat16() @ self.inner[:, self.order].bfloat16().T).to(
            self.head
        ) @ self.head.T


class Asking(Wide):
    """Computes something else in another type."""

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if x.dtype == torch.bfloat16 else torch.tanh(x)


@pytest.mark.parametrize("kind", [Cast, Asking])
def test_code_that_names_its_type_is_compared_in_it(kind: type[Wide]) -> None:
    expected = ModuleDecoder(kind(torch.arange(512)).bfloat16())
    other = kind(torch.arange(512).roll(3)).bfloat16()
    found = compare_decoders(
        "b = a", expected, ModuleDecoder(other), 5e-2, vocabulary_size=16, shapes=[(1, 2)]
    )
    assert all(line.holds for line in found)
    wrong = kind(torch.arange(512)).bfloat16()
    with torch.no_grad():
        wrong.head.mul_(2)
    (line,) = compare_decoders(
        "b = a", expected, ModuleDecoder(wrong), 5e-2, vocabulary_size=16, shapes=[(1, 2)]
    )
    assert not line.holds


class Cancelling(nn.Module):
    """Adds and takes away again what hides its logits in half precision, by two products."""

    def __init__(self, first: bool):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(16, 32, generator=generator))
        self.loud = nn.Parameter(300.0 * torch.randn(32, 16, generator=generator))
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        loud = x @ self.loud
        return (loud - loud) + x[..., :16] if self.first else (loud + x[..., :16]) - (x.clone() @ self.loud)


def test_an_error_of_more_than_half_is_rounding_where_noise_does_as_much() -> None:
    def line_of(actual: nn.Module) -> Verification:
        expected = Cancelling(first=False).bfloat16()
        (line,) = compare_decoders(
            "b = a", expected, actual.bfloat16(), 5e-2, vocabulary_size=16, shapes=[(2, 9)]
        )
        return line

    half = compare(
        "b = a",
        Cancelling(first=False).bfloat16()(torch.arange(16)[None]),
        Cancelling(first=True).bfloat16()(torch.arange(16)[None]),
        5e-2,
    )
    assert half.max_rel_error > 0.5
    line = line_of(Cancelling(first=True))
    assert line.name == "b = a" + IN_FLOAT32 and line.holds
    wrong = Cancelling(first=True)
    with torch.no_grad():
        wrong.embedding.mul_(1.02)
    assert not line_of(wrong).holds
