"""The gate operation: its schema, its gradient, and that ones change no bit."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dispfx.ir.gate import GATE, gate, gate_product

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def every_kind_of_number(dtype: torch.dtype) -> Tensor:
    """Return (4, 5) values with NaN, infinities, both zeros, subnormals and the largest numbers."""
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps  # the smallest subnormal
    special = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        limits.max,
        limits.min,
        smallest,
        -smallest,
    ]
    plain = [1.0, -1.0, 1 / 3, limits.eps, 3.14159, -2.71828, 65.5, 1e-3, -7.0, limits.tiny, -limits.tiny]
    return torch.tensor([*special, *plain], dtype=torch.float64).to(dtype).view(4, 5)


def bits(x: Tensor) -> Tensor:
    return x.view(INTEGER_OF[x.element_size()])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_ones_change_no_bit_of_any_number(dtype: torch.dtype, dim: int):
    x = every_kind_of_number(dtype)
    assert x.isnan().any() and x.isinf().any() and bool(((x == 0) & x.signbit()).any())
    for mask_dtype in (dtype, torch.float32):
        gated = gate(x, torch.ones(x.shape[dim], dtype=mask_dtype), dim)
        assert gated.dtype == dtype
        assert torch.equal(gated.isnan(), x.isnan()), "a NaN stays a NaN, whatever its payload"
        assert torch.equal(bits(gated)[~x.isnan()], bits(x)[~x.isnan()])


def test_a_mask_multiplies_its_dimension_alone():
    x, mask = torch.randn(2, 3, 4), torch.tensor([1.0, 0.0, 0.5])
    gated = gate(x, mask, 1)
    for feature, value in enumerate(mask):
        assert torch.equal(gated[:, feature], x[:, feature] * value)


def test_the_result_is_a_new_tensor():
    x = torch.randn(2, 3)
    before = x.clone()
    gate(x, torch.ones(3), 1).fill_(7.0)
    assert torch.equal(x, before)


def test_the_schema_and_every_registration_hold():
    x = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.rand(3, requires_grad=True)
    with warnings.catch_warnings():
        # opcheck itself asks tensors that are no leaves for their gradients.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        torch.library.opcheck(GATE, (x, mask, 1))
        torch.library.opcheck(GATE, (x.detach().bfloat16(), mask, 1))
        torch.library.opcheck(GATE, (x, torch.rand(2, 4, requires_grad=True), 2))
        torch.library.opcheck(GATE, (x, torch.rand(12, requires_grad=True), 2, torch.tensor([2, 0])))
    expected = "dispfx::gate(Tensor x, Tensor mask, SymInt dim, Tensor? experts=None) -> Tensor"
    assert str(GATE._schema) == expected


def test_the_fake_kernel_knows_shape_and_dtype_and_refuses_a_wide_mask():
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, dtype=torch.bfloat16)
        gated = GATE(x, torch.empty(3), 1)
        assert (gated.shape, gated.dtype) == (x.shape, x.dtype)
        assert GATE(x, torch.empty(2, 3), 1).shape == x.shape
        with pytest.raises(ValueError, match="one dimension or two"):
            GATE(x, torch.empty(1, 1, 3), 1)
        with pytest.raises(ValueError, match="2 features cannot gate 3"):
            GATE(x, torch.empty(2), 1)
        experts = torch.empty(2, dtype=torch.int64)
        assert GATE(x, torch.empty(9), 1, experts).shape == x.shape
        with pytest.raises(ValueError, match="8 features cannot gate 3"):
            GATE(x, torch.empty(8), 1, experts)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients_are_those_of_the_product(dim: int):
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(x.shape[dim], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value, m: gate(value, m, dim), (x, mask))


@pytest.mark.parametrize("dim", [1, 2])
def test_every_run_of_the_first_dimension_has_its_own_mask(dim: int):
    x = torch.randn(6, 3, 4, dtype=torch.float64, requires_grad=True)
    masks = torch.rand(2, x.shape[dim], dtype=torch.float64, requires_grad=True)
    gated = gate(x, masks, dim)
    expected = torch.cat([gate(x[:3], masks[0], dim), gate(x[3:], masks[1], dim)])
    assert torch.equal(gated, expected)
    assert torch.autograd.gradcheck(lambda value, m: gate(value, m, dim), (x, masks))


EXPERTS = torch.tensor([2, 0, 0, 1])


@pytest.mark.parametrize("product", [gate, gate_product])
@pytest.mark.parametrize("dim", [1, 2])
def test_every_position_has_the_mask_of_its_expert(product, dim: int):
    x = torch.randn(4, 3, 5, dtype=torch.float32, requires_grad=True)
    mask_EN = torch.rand(3, x.shape[dim], requires_grad=True)
    gated = product(x, mask_EN.flatten(), dim, EXPERTS)
    expected = torch.stack([gate(x[row], mask_EN[e], dim - 1) for row, e in enumerate(EXPERTS)])
    assert torch.equal(gated, expected)
    for ours, theirs in zip(
        torch.autograd.grad(gated.square().sum(), (x, mask_EN)),
        torch.autograd.grad(expected.square().sum(), (x, mask_EN)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradients_by_expert_are_those_of_the_product():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value, m: gate(value, m, 1, EXPERTS), (x, mask))


def test_every_run_has_the_masks_of_its_sample_for_each_expert():
    x, masks = torch.randn(4, 5), torch.rand(2, 15)
    expected = torch.cat([gate(x[:2], masks[0], 1, EXPERTS[:2]), gate(x[2:], masks[1], 1, EXPERTS[2:])])
    assert torch.equal(gate(x, masks, 1, EXPERTS), expected)
    of_all_sites = torch.cat([torch.rand(2, 3), masks], dim=1)
    assert torch.equal(gate(x, of_all_sites.split([3, 15], -1)[1], 1, EXPERTS), expected)


def test_a_number_beyond_the_last_expert_counts_as_the_last():
    x, mask = torch.randn(2, 3), torch.rand(6)
    assert torch.equal(gate(x, mask, 1, torch.tensor([7, 0])), gate(x, mask, 1, torch.tensor([1, 0])))


def test_a_flattened_batch_keeps_its_sequences_in_runs():
    x, masks = torch.randn(4, 5, 3), torch.rand(2, 3)
    assert torch.equal(gate(x.flatten(0, 1), masks, 1), gate(x, masks, 2).flatten(0, 1))


@pytest.mark.parametrize(("shape", "dim"), [((5, 3), 1), ((3, 4), 0)])
def test_masks_that_do_not_divide_the_first_dimension_are_refused(shape, dim: int):
    with pytest.raises(ValueError, match="2 masks do not divide"):
        gate(torch.randn(shape), torch.rand(2, 3), dim)


def test_several_masks_of_ones_change_no_bit():
    x = every_kind_of_number(torch.float32)
    gated = gate(x, torch.ones(2, 5), 1)
    assert torch.equal(bits(gated)[~x.isnan()], bits(x)[~x.isnan()])


def test_each_gradient_is_computed_only_where_it_is_asked():
    x, mask = torch.randn(2, 3), torch.rand(3, requires_grad=True)
    gate(x, mask, 1).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(mask.grad, x.sum(0))


def test_a_mask_gradient_in_half_precision_is_summed_in_float32():
    """65,536 ones summed in bfloat16 stop at 256; the mask's gradient must not."""
    x = torch.ones(65536, 2, dtype=torch.bfloat16)
    mask = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    gate(x, mask, 1).sum().backward()
    assert mask.grad is not None and mask.grad.tolist() == [65536.0, 65536.0]
