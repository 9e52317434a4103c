"""Sums, norms and gates between two branches as one operation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispfx.ir.gate import GATE
from dispfx.ir.ops import aten
from dispfx.training import bodies, preparation
from dispfx.training.bodies import compiled_function
from dispfx.training.comparison import compare, sample_masks
from dispfx.training.decoder import TrainingDecoder
from dispfx.training.norm_gates import add_norm_gate, join_norm_gates
from dispfx.training.preparation import Compute, _Preparation
from tests import plain_decoders
from tests.plain_decoders import FORMS
from tests.programs import token_ids
from tests.training.gated import WithValues, plain_and_fast

WIDTH = 8


def always(dtype: torch.dtype, width: int) -> bool:
    return True


def operations(form: str) -> list[tuple[bool, bool]]:
    """Return for each operation in a layer's body whether it adds a write and whether it normalises."""
    _, fast = plain_and_fast(form)
    assert fast.outline is not None
    part = fast.outline.layers[0]
    graph = copy.deepcopy(part.body.graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    count = join_norm_gates(graph, frozenset(inputs[len(part.values) :]), always)
    found = [node.args for node in graph.nodes if node.target is add_norm_gate]
    assert len(found) == count
    return [(written is not None, weight is not None) for _, written, _, weight, *_ in found]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("pre-norm", [(False, True), (True, True), (True, False)]),
        ("layer-norm-with-bias", [(False, True), (True, True), (True, False)]),
        # Two norms of one value: one of them is computed with it.
        ("parallel-one-add", [(False, True), (True, False)]),
        ("parallel-two-adds", [(False, True), (True, False), (True, False)]),
    ],
)
def test_what_lies_between_two_branches_is_one_operation(form: str, expected: list[tuple[bool, bool]]):
    assert operations(form) == expected


def test_torchs_own_root_mean_square_is_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_decoders, "RMSNorm", lambda: nn.RMSNorm(plain_decoders.WIDTH))
    assert operations("pre-norm") == [(False, True), (True, True), (True, False)]
    test_a_compiled_decoder_has_the_gradients_of_a_plain_one(monkeypatch, "pre-norm", ())


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("samples", [(), (2,)])
def test_a_compiled_decoder_has_the_gradients_of_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, form: str, samples: tuple[int, ...]
):
    monkeypatch.setattr(bodies, "BACKEND", "aot_eager")
    _, fast = plain_and_fast(form)
    plain, compiled = TrainingDecoder(fast), TrainingDecoder(fast, compiled=True, norm_gates=always)
    masks = sample_masks((*samples, sum(plain.sizes)), torch.device("cpu"))
    found = compare(compiled.loss, plain.loss, token_ids(4, 24), masks, torch.float32, plain.sizes)
    assert found.loss < 1e-6 and found.gradient < 1e-5 and found.direction > 1 - 1e-6


def test_layers_that_are_computed_again_have_them_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "BACKEND", "aot_eager")
    _, fast = plain_and_fast()
    plain = TrainingDecoder(fast)
    compiled = TrainingDecoder(fast, compiled=True, checkpointing=True, norm_gates=always)
    masks = sample_masks((sum(plain.sizes),), torch.device("cpu"))
    found = compare(compiled.loss, plain.loss, token_ids(2, 24), masks, torch.float32, plain.sizes)
    assert found.loss < 1e-6 and found.gradient < 1e-5 and found.direction > 1 - 1e-6


def plainly(
    x: Tensor, written: Tensor, write_mask: Tensor, weight: Tensor, bias: Tensor | None, read_mask: Tensor,
    is_rms: bool, rounds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = x + GATE(written, write_mask, 2)
    if not is_rms:
        return total, GATE(F.layer_norm(total, (WIDTH,), weight, bias, 1e-5), read_mask, 2)
    whole = total.float()
    scaled = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
    scaled = scaled.to(x.dtype) if rounds else scaled
    return total, GATE((weight * scaled).to(x.dtype), read_mask, 2)


def results_of(call: Callable[..., Any], given: list[Tensor | None]) -> list[Tensor]:
    """Return values and the gradients of all but the norm's weights."""
    leaves = [value if value is None else value.clone().requires_grad_() for value in given]
    total, normed = call(*leaves)
    slope = torch.linspace(-1, 1, total.numel()).view_as(total)
    (total * slope + normed * slope.sin()).sum().backward()
    learned = [leaves[place] for place in (0, 1, 2, 5)]
    return [total, normed, *(leaf.grad for leaf in learned if leaf is not None and leaf.grad is not None)]


@pytest.mark.parametrize("samples", [(), (2,)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("is_rms", "rounds"), [(False, False), (True, False), (True, True)])
def test_values_are_those_of_the_operations_and_the_gradient_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
    is_rms: bool,
    rounds: bool,
    dtype: torch.dtype,
    tolerance: float,
    compiled: bool,
    samples: tuple[int, ...],
):
    monkeypatch.setattr(bodies, "BACKEND", "aot_eager")
    torch.compiler.reset()  # one function is compiled for every case, more of them than torch would
    generator = torch.Generator().manual_seed(0)
    x, written = torch.randn(2, 4, 5, WIDTH, generator=generator).to(dtype)
    weight, bias = torch.randn(2, WIDTH, generator=generator).to(dtype)
    write_mask, read_mask = torch.rand(2, *samples, WIDTH, generator=generator)
    given = [x, written, write_mask, weight, None if is_rms else bias, read_mask]

    def ours(x: Tensor, *others: Any) -> Any:
        written, write_mask, weight, bias, read_mask = others
        return add_norm_gate(x, written, write_mask, weight, bias, read_mask, 1e-5, is_rms, rounds)

    def theirs(x: Tensor, *others: Any) -> Any:
        written, write_mask, weight, bias, read_mask = others
        return plainly(x, written, write_mask, weight, bias, read_mask, is_rms, rounds)

    found = results_of(compiled_function(ours) if compiled else ours, given)
    expected = results_of(theirs, given)
    assert len(found) == len(expected) == 6
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
    # A gate that is spelled as a product rounds once more than the gate.
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_what_only_looks_like_it_is_left_alone():
    graph = fx.Graph()
    x, written, mask, weight, made = (
        graph.placeholder(name) for name in ("x", "written", "mask", "weight", "made")
    )

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(target, args, kwargs)

    by_token = call(aten.add.Tensor, x, call(GATE, written, mask, 1))
    twice = call(GATE, written, mask, 2)
    shared = call(aten.layer_norm.default, x, [4], weight)
    as_one_row = call(aten.reshape.default, call(aten.layer_norm.default, by_token, [4], weight), [2, 16])
    wide = call(aten.cat.default, [mask] * 4)
    graph.output((
        by_token,
        call(aten.add.Tensor, x, twice),
        call(aten.mul.Tensor, twice, 2.0),
        call(GATE, call(aten.layer_norm.default, x, [4], made), mask, 2),
        call(GATE, shared, mask, 2),
        call(aten.relu.default, shared),
        call(aten.add.Tensor, x, call(GATE, written, mask, 2), alpha=2),
        call(GATE, as_one_row, wide, 1),
    ))  # fmt: skip
    module = fx.GraphModule(nn.Module(), graph)
    values = (torch.randn(2, 4, 4), torch.randn(2, 4, 4), torch.rand(4), torch.randn(4), torch.randn(4))
    expected = WithValues(module).run(*values)
    assert join_norm_gates(module.graph, {weight}, always) == 0
    module.recompile()
    assert all(map(torch.equal, module(*values), expected))


def test_a_norm_that_is_gated_row_by_row_is_matched_through_the_view():
    graph = fx.Graph()
    x, mask, weight = (graph.placeholder(name) for name in ("x", "mask", "weight"))
    shifted = graph.call_function(aten.add.Tensor, (weight, 1.0))
    normal = graph.call_function(aten.layer_norm.default, (x, [4], shifted))
    rows = graph.call_function(aten.reshape.default, (normal, [-1, 4]))
    graph.output((graph.call_function(GATE, (rows, mask, 1)), x))
    module = fx.GraphModule(nn.Module(), graph)
    values = (torch.randn(2, 3, 4), torch.rand(4), torch.randn(4))
    expected = WithValues(module).run(*values)
    assert join_norm_gates(module.graph, {weight}, always) == 1
    module.recompile()
    found = module(*values)
    assert found[0].shape == (6, 4)
    torch.testing.assert_close(found, expected)


def test_a_stream_that_does_not_fit_is_left_alone():
    _, fast = plain_and_fast()
    assert fast.outline is not None
    graph = copy.deepcopy(fast.outline.layers[0].body.graph)
    asked: set[tuple[torch.dtype, int]] = set()
    assert join_norm_gates(graph, set(), lambda dtype, width: bool(asked.add((dtype, width)))) == 0
    assert asked == {(torch.float32, 32)}


def preparation_on(device: str, compute: Compute, notes: list[str]) -> _Preparation:
    plain, fast = plain_and_fast()
    made = _Preparation(plain, fast, token_ids(2, 24), compute, 1, notes.append, bool, None)
    with FakeTensorMode():
        made.ids_BT = torch.empty(2, 24, dtype=torch.long, device=device)
    return made


def test_a_gpu_without_the_kernel_is_told_once_and_a_cpu_nothing(monkeypatch: pytest.MonkeyPatch):
    notes = list[str]()
    monkeypatch.setattr(preparation, "obstacle", lambda device, dtype, width: "the kernel fails: no ptxas")
    on_gpu = preparation_on("cuda", Compute(), notes)
    assert not on_gpu._has_norm_gates(torch.bfloat16, 64) and not on_gpu._has_norm_gates(torch.bfloat16, 64)
    assert notes == ["the gradient of norms and gates is left to the compiler: the kernel fails: no ptxas"]
    for device, compute in (("cpu", Compute()), ("cuda", Compute(norm_gates=False))):
        assert not preparation_on(device, compute, notes)._has_norm_gates(torch.bfloat16, 64)
    assert len(notes) == 1


def test_a_gpu_with_the_kernel_takes_it(monkeypatch: pytest.MonkeyPatch):
    notes = list[str]()
    monkeypatch.setattr(preparation, "obstacle", lambda device, dtype, width: None)
    assert preparation_on("cuda", Compute(), notes)._has_norm_gates(torch.bfloat16, 64) and not notes
