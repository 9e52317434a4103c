"""A decoder whose logits are random, or depend on earlier calls, is refused at capture."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import capture
from dispfx.errors import CaptureError
from tests.plain_decoders import FORMS, Decoder

IDS = torch.arange(10).view(1, 10)


class Scaled(Decoder):
    """A decoder whose logits are scaled by what a function of the module returns."""

    calls: Tensor

    def __init__(self, scale: Callable[[Any], Tensor | float], **buffers: Tensor):
        torch.manual_seed(0)
        super().__init__(FORMS["pre-norm"], layers=1)
        self.scale, self.python_calls = scale, 0
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale(self)


def from_the_fourth_call(module: Any) -> Tensor:
    module.calls += 1
    return 1 + 0.1 * (module.calls > 3)


def from_the_thousandth_call(module: Any) -> Tensor:
    module.calls += 1
    return 1 + 0.1 * (module.calls > 999)


def assigned(module: Any) -> Tensor:
    module.calls = module.calls + 1
    return 1 + 0.1 * (module.calls > 999)


def of_a_running_mean(module: Any) -> Tensor:
    module.calls.mul_(0.9).add_(0.1)
    return 1 + module.calls


@pytest.mark.parametrize("scale", [from_the_fourth_call, from_the_thousandth_call, assigned])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.float32])
def test_a_counter_that_changes_the_logits_of_later_calls_is_refused_by_name(scale, dtype: torch.dtype):
    decoder = Scaled(scale, calls=torch.zeros((), dtype=dtype)).eval()
    with pytest.raises(CaptureError, match="depend on a buffer that each call changes") as error:
        capture(decoder)
    assert error.value.where == "calls" and error.value.exit_code == 2
    assert float(decoder.calls) == 0, "the module is as it was"


def test_a_tensor_that_is_no_buffer_and_counts_calls_is_refused_too():
    decoder = Scaled(assigned).eval()
    decoder.__dict__["calls"] = torch.zeros(())
    with pytest.raises(CaptureError, match="depend on a buffer that each call changes"):
        capture(decoder)
    decoder = Scaled(from_the_thousandth_call).eval()
    decoder.__dict__["calls"] = torch.zeros(())
    with pytest.raises(CaptureError):
        capture(decoder)


class Held:
    """Any object that a module may hold."""


def in_a_dict(module: Any) -> Tensor:
    module.held["count"] = module.held["count"] + 1
    return 1 + 0.1 * (module.held["count"] > 20)


def in_a_list_of_a_dict(module: Any) -> Tensor:
    module.held["of"][1] = module.held["of"][1] + 1
    return 1 + 0.1 * (module.held["of"][1] > 20)


def in_an_object_of_a_tuple(module: Any) -> Tensor:
    module.held[0].count = module.held[0].count + 1
    return 1 + 0.1 * (module.held[0].count > 20)


def in_an_object_of_a_part(module: Any) -> Tensor:
    module.head.state.count = module.head.state.count + 1
    return 1 + 0.1 * (module.head.state.count > 20)


@pytest.mark.parametrize(
    ("scale", "path"),
    [
        (in_a_dict, "held['count']"),
        (in_a_list_of_a_dict, "held['of'][1]"),
        (in_an_object_of_a_tuple, "held[0].count"),
        (in_an_object_of_a_part, "head.state.count"),
    ],
)
def test_a_tensor_that_counts_calls_is_refused_wherever_the_module_holds_it(scale, path: str):
    decoder: Any = Scaled(scale).eval()
    state: Any = Held()
    state.count, state.itself = torch.zeros(()), state
    decoder.head.state = state
    decoder.held = {
        in_a_dict: {"count": torch.zeros(())},
        in_a_list_of_a_dict: {"of": [None, torch.zeros(())]},
        in_an_object_of_a_tuple: (state,),
    }.get(scale)
    if decoder.held is not None:
        del decoder.head.state
    with pytest.raises(CaptureError, match="depend on a buffer that each call changes") as error:
        capture(decoder)
    assert error.value.where == path
    assert float(state.count) == 0, "the module is as it was"


def test_a_tensor_in_a_dict_that_the_logits_do_not_depend_on_may_change():
    def scale(module: Any) -> Tensor:
        module.held["count"] = module.held["count"] + 1
        return module.held["factor"]

    decoder: Any = Scaled(scale).eval()
    decoder.held = {"count": torch.zeros(()), "factor": torch.tensor(2.0)}
    program = capture(decoder)
    with torch.no_grad():
        assert torch.equal(program.graph_module(IDS), decoder(IDS))


def test_a_running_mean_that_the_logits_read_is_refused_by_name():
    decoder = Scaled(of_a_running_mean, calls=torch.zeros(())).eval()
    with pytest.raises(CaptureError, match="depend on a buffer that each call changes"):
        capture(decoder)


@pytest.mark.parametrize("threshold", [2, 3, 4, 6])
def test_a_counter_in_python_is_found_by_calling_the_module(threshold: int):
    def scale(module: Any) -> float:
        module.python_calls += 1
        return 1.1 if module.python_calls > threshold else 1.0

    with pytest.raises(CaptureError, match="other logits each time"):
        capture(Scaled(scale).eval())


def counted(module: Any) -> float:
    module.calls += 1
    return 1.0


def counted_and_multiplied_by_zero(module: Any) -> Tensor:
    module.calls += 1
    return 1 + 0 * module.calls


def overwritten_before_it_is_read(module: Any) -> Tensor:
    module.table[:2].copy_(torch.ones(2))
    return module.table[0]


@pytest.mark.parametrize("scale", [counted, counted_and_multiplied_by_zero, overwritten_before_it_is_read])
def test_a_write_that_the_logits_do_not_depend_on_is_fine(scale):
    decoder = Scaled(scale, calls=torch.zeros((), dtype=torch.int64), table=torch.zeros(5)).eval()
    program = capture(decoder)
    with torch.no_grad():
        assert torch.equal(program.graph_module(IDS), decoder(IDS))


def noise_in_the_weak_bits(module: Any) -> Tensor:
    return 1 + 1e-7 * torch.randn(())


def dropped_out(module: Any) -> Tensor:
    return nn.functional.dropout(torch.ones(()), 0.5, training=True)


@pytest.mark.parametrize(("scale", "named"), [(noise_in_the_weak_bits, "randn"), (dropped_out, "dropout")])
def test_numbers_that_are_drawn_are_refused_with_operation_and_line(scale, named: str):
    with pytest.raises(CaptureError, match="draws other numbers each time that the module runs") as error:
        capture(Scaled(scale).eval())
    assert named in error.value.problem and "test_repeatable.py:" in str(error.value.where)


def test_noise_from_python_is_found_bit_for_bit():
    with pytest.raises(CaptureError, match="other logits each time"):
        capture(Scaled(lambda module: 1 + 1e-7 * random.random()).eval())


def test_dropout_that_is_off_draws_nothing():
    def scale(module: Any) -> Tensor:
        off = nn.functional.dropout(torch.ones(()), 0.5, training=False)
        return off * nn.functional.dropout(torch.ones(()), 0.0, training=True)

    assert capture(Scaled(scale).eval()).identity


class Written(Decoder):
    """A decoder that changes a weight in place each time that it runs."""

    def __init__(self, write: Callable[[Tensor], object], learned: bool):
        torch.manual_seed(0)
        super().__init__(FORMS["pre-norm"], layers=1)
        self.write = write
        self.requires_grad_(learned)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.head.weight)
        return super().forward(ids)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    "write", [lambda w: w.mul_(1.0), lambda w: w[:2].add_(0), lambda w: w.view(-1).clamp_(-9, 9).mul_(1)]
)
def test_a_parameter_that_each_call_writes_in_place_is_refused_by_name(write, learned: bool):
    decoder = Written(write, learned).eval()
    before = decoder.head.weight.clone()
    with pytest.raises(CaptureError, match=r"a parameter in place each|a parameter that each call") as error:
        capture(decoder)
    assert str(error.value.where).startswith("head.weight") and error.value.exit_code == 2
    assert error.value.hint and torch.equal(decoder.head.weight, before)


def test_any_other_failure_to_make_a_graph_functional_names_its_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise AssertionError("expected one thing\nand got another")

    monkeypatch.setattr("torch.export.ExportedProgram.run_decompositions", fail)
    monkeypatch.setattr("dispfx.capturing.unlifting.spell_in_place", lambda graph: False)
    with pytest.raises(CaptureError, match="AssertionError: expected one thing") as error:
        capture(Scaled(lambda module: 1.0).eval())
    assert "another" not in error.value.problem and error.value.exit_code == 2
