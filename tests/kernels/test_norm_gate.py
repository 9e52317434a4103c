"""The gradient of a write, a sum, a norm and a read as one operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dispfx.ir.gate import GATE
from dispfx.kernels import norm_gate
from dispfx.kernels.norm_gate import Operands, drawn_operands, obstacle, reference

WIDTH = 12
GPU = torch.device("cuda:0")


def by_autograd(given: Operands) -> list[Tensor]:
    """Return the gradients of x, of what is written and of both masks, those that there are."""
    written, write_mask, read_mask = given.written, given.write_mask, given.read_mask
    x = given.total if given.total is not None else torch.zeros_like(given.of_total)
    if written is not None and write_mask is not None:
        x = x - GATE(written, write_mask, 2)
    leaves = [v if v is None else v.clone().requires_grad_() for v in (x, written, write_mask, read_mask)]
    of_x, of_written, of_write, of_read = leaves
    assert of_x is not None
    total = of_x if of_written is None or of_write is None else of_x + GATE(of_written, of_write, 2)
    results = [(total, given.of_total)]
    if given.of_normed is not None:
        assert of_read is not None and given.weight is not None
        if given.mean is not None:
            normal = F.layer_norm(total, (WIDTH,), given.weight, given.bias, 1e-5)
        else:
            normal = F.rms_norm(total, (WIDTH,), given.weight, 1e-5)
        results.append((GATE(normal, of_read, 2), given.of_normed))
    torch.autograd.backward([value for value, _ in results], [slope for _, slope in results])
    return [leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None]


@pytest.mark.parametrize("masks", [1, 2])
@pytest.mark.parametrize(
    ("norm", "writes"), [("rms", True), ("layer", True), ("rms", False), ("layer", False)]
)
def test_gradients_are_those_of_autograd(norm: str, writes: bool, masks: int):
    given = drawn_operands(norm, WIDTH, torch.float64, writes=writes, masks=masks)
    found = [value for value in reference(given) if value.numel()]
    expected = by_autograd(given)
    assert len(found) == len(expected) == (4 if writes else 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("masks", [1, 2])
def test_a_write_alone_has_the_gradients_of_autograd(masks: int):
    given = drawn_operands(None, WIDTH, torch.float64, masks=masks)
    of_x, *found, of_read = reference(given)
    own, *expected = by_autograd(given)
    assert of_x.numel() == of_read.numel() == 0 and torch.equal(own, given.of_total)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["rms", "layer", None])
def test_the_operation_is_well_behaved(norm: str | None):
    torch.library.opcheck(norm_gate.add_norm_gate_backward, tuple(drawn_operands(norm, WIDTH, torch.float32)))


def reason(monkeypatch: pytest.MonkeyPatch, apart: float) -> str | None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(norm_gate, "apart_from_reference", lambda device, dtype, width: [1e-7, apart])
    obstacle.cache_clear()
    found = obstacle(GPU, torch.float32, 64)
    obstacle.cache_clear()
    return found


def test_a_kernel_is_used_where_its_numbers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch):
    assert reason(monkeypatch, 1e-6) is None
    assert reason(monkeypatch, 1e-3) == "the kernel's numbers are 1.0e-03 from torch's"
    assert reason(monkeypatch, float("inf")) == "the kernel's numbers are inf from torch's"


def test_what_the_kernel_is_not_for_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert obstacle(torch.device("cpu"), torch.float32, 64) == "the kernel is for CUDA"
    for dtype, width in ((torch.float32, 4097), (torch.bfloat16, 8193), (torch.float64, 64)):
        found = obstacle(GPU, dtype, width)
        assert found == "the kernel is for rows of at most 16384 bytes in half or single precision"


def test_a_kernel_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> list[float]:
        raise RuntimeError("no ptxas\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(norm_gate, "apart_from_reference", fail)
    obstacle.cache_clear()
    assert obstacle(GPU, torch.float32, 64) == "the kernel fails: RuntimeError: no ptxas"
    obstacle.cache_clear()
