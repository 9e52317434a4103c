"""Whatever way a gradient is given, parameters and state are those of torch's AdamW."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispfx.learning import outer_adamw
from dispfx.learning.outer_adamw import OuterAdamW, steps_of_both
from dispfx.learning.outer_product import OuterProduct
from tests.kernels.interpreter import require_interpreter
from tests.processes import run_code

STEPS, BAD = 50, (0, 7, 8)


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def start() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(drawn(3, 5, 4)), nn.Parameter(drawn(6))


def run_of_torch() -> list[Tensor]:
    heads, other = start()
    optimizer = torch.optim.AdamW([heads, other], lr=1.0, weight_decay=0.1)
    for step in range(STEPS):
        left, right, of_other = drawn(3, 5), drawn(3, 4), drawn(6)
        if step in BAD:
            continue
        optimizer.param_groups[0]["lr"] = rate(step)
        heads.grad, other.grad = torch.einsum("cw,cf->cwf", left, right), of_other
        optimizer.step()
    return [heads, other, *optimizer.state[heads].values(), *optimizer.state[other].values()]


def run_of_outer(*, kernels: bool) -> list[Tensor]:
    heads, other = start()
    optimizer = OuterAdamW([heads, other], lr=1.0, weight_decay=0.1)
    for step in range(STEPS):
        outer = {heads: OuterProduct(drawn(3, 5), drawn(3, 4))}
        other.grad = drawn(6)
        optimizer.param_groups[0]["lr"] = rate(step)
        skip = torch.tensor(float(step in BAD))
        if kernels:
            optimizer.apply_kernels(outer, skip)
            outer = {}
        optimizer.apply(outer, skip)
        optimizer.zero_grad()
    assert list(optimizer.state[heads]) == list(optimizer.state[other])
    return [heads, other, *optimizer.state[heads].values(), *optimizer.state[other].values()]


def compare(*, kernels: bool) -> None:
    for found, expected in zip(run_of_outer(kernels=kernels), run_of_torch(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def compare_tiles(columns: int) -> None:
    """As a run on a GPU does before it uses the kernels: several matrices, and a tile that is not full."""
    found, expected = (
        steps_of_both(torch.device("cpu"), columns, kernels=kernels) for kernels in (True, False)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_fifty_steps_are_those_of_torch_and_bad_ones_change_nothing():
    compare(kernels=False)


@pytest.mark.parametrize("call", ["compare(kernels=True)", "compare_tiles(128)", "compare_tiles(32)"])
def test_the_kernels_do_the_steps_of_torch(call: str):
    require_interpreter()
    # Triton asks for its interpreter once, when it is imported, which another test may have done.
    done = run_code(f"import {__name__} as tests; tests.{call}", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_the_product_is_written_for_torchs_own():
    heads, _ = start()
    product = OuterProduct(drawn(3, 5), drawn(3, 4))
    OuterAdamW([heads], lr=1e-3, weight_decay=0.1).apply({heads: product}, torch.zeros(()))
    assert heads.grad is not None and torch.equal(heads.grad, product.written())


def test_a_state_of_torchs_own_goes_on_here():
    (first, _), (second, _) = start(), start()
    own = torch.optim.AdamW([first], lr=1e-3, weight_decay=0.1, fused=True)
    ours = OuterAdamW([second], lr=1e-3, weight_decay=0.1)
    products = [OuterProduct(drawn(3, 5), drawn(3, 4)) for _ in range(2)]
    first.grad = products[0].written()
    own.step()
    ours.load_state_dict(deepcopy(own.state_dict()))
    second.data.copy_(first)
    first.grad = products[1].written()
    own.step()
    ours.apply({second: products[1]}, torch.zeros(()))
    assert torch.equal(first, second)
    assert all(torch.equal(value, ours.state[second][key]) for key, value in own.state[first].items())


def on_a_gpu(columns: int) -> nn.Parameter:
    with FakeTensorMode():
        return nn.Parameter(torch.empty(3, 5, columns, device="cuda"))


def test_a_gpu_without_the_kernels_is_told_once_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    notes, heads = list[str](), [on_a_gpu(48), on_a_gpu(48)]
    optimizer = OuterAdamW(heads, lr=1e-3, weight_decay=0.1, note=notes.append)
    assert not any(optimizer._has_kernels(parameter) for parameter in heads)
    (note,) = notes
    assert note.startswith("gradients of the hypernetwork's heads are written out: ") and "not 48" in note


def test_a_cpu_is_told_nothing_and_a_gpu_with_the_kernels_neither(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outer_adamw, "_obstacle", lambda parameter: None)
    notes, (heads, _) = list[str](), start()
    optimizer = OuterAdamW([heads], lr=1e-3, weight_decay=0.1, note=notes.append)
    assert optimizer._has_kernels(on_a_gpu(64)) and not optimizer._has_kernels(heads)
    assert not notes


def test_kernels_that_get_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outer_adamw.importlib.util, "find_spec", lambda name: object())
    off = 0.0

    def steps(device: torch.device, columns: int, *, kernels: bool) -> list[Tensor]:
        parameter, *state = steps_of_both(device, columns, kernels=False)
        return [parameter + off if kernels else parameter, *state]

    monkeypatch.setattr(outer_adamw, "steps_of_both", steps)
    assert outer_adamw._disagreement.__wrapped__(torch.device("cpu"), 16) is None
    off = 1e-3
    found = outer_adamw._disagreement.__wrapped__(torch.device("cpu"), 16)
    assert found is not None and "other numbers" in found


def test_kernels_that_fail_are_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outer_adamw.importlib.util, "find_spec", lambda name: object())
    # Triton's kernels take no tensors of the CPU, and where there is no Triton there are no kernels.
    found = outer_adamw._disagreement.__wrapped__(torch.device("cpu"), 16)
    assert found is not None and found.startswith("the kernels fail: ")
