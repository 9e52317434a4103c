"""What would fail after learning fails before it: every later stage runs on random selections first."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx import api
from dispfx.compiler.programs import lower_program
from dispfx.errors import OutputError, PassError, UnsupportedGraphError, VerificationError
from dispfx.passes import lower_gates
from dispfx.plan.budget import Budget
from dispfx.run import rehearsal
from dispfx.run.rehearsal import random_plan, rehearse
from tests.one_branch import VOCABULARY, Middle, one_branch
from tests.passes.test_fold_statistics import ChangedMiddle, ternary
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import tiny_transformer


class Scaled(nn.Module):
    """An MLP whose output is scaled by a number that follows from the length."""

    def __init__(self, scale: Any):
        super().__init__()
        # Wide enough for widths that meet a ratio.
        self.body, self.scale = Middle(lambda m, h: F.gelu(h), up=96, down=96), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale(x.shape[1])


def by_quotient(length: int) -> float:
    return 1 / (math.ceil(length / 4) + math.floor(length / 3) + 1)


def by_product(length: int) -> float:
    """A rounding that torch.export cannot store."""
    return 1 / math.ceil(length * 0.25)


def compiled(model: nn.Module, out: Path, **changes: Any) -> Any:
    tokens = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    return api.compile(model, 0.3, data=tokens, out=out, steps=2, seq_len=16, align=1, **changes)


def test_what_cannot_be_written_is_refused_before_learning(tmp_path: Path):
    with pytest.raises(OutputError, match="ceil") as refusal:
        compiled(one_branch(lambda: Scaled(by_product)), tmp_path / "out")
    assert refusal.value.exit_code == 2 and len(str(refusal.value).splitlines()) <= 3
    assert not list(tmp_path.iterdir()), "nothing was learned"


def test_whole_quotients_of_sizes_compile_and_load(tmp_path: Path):
    model = one_branch(lambda: Scaled(by_quotient))
    report = compiled(model, tmp_path / "out")
    assert all(line.holds for line in report.verify)
    plan = dispfx.Plan.load(tmp_path / "out" / "plan.safetensors")
    expected = dispfx.gated(dispfx.capture(model), plan)
    for length in (5, 8, 21):
        ids = token_ids(2, length, vocabulary=VOCABULARY)
        assert relative_error(dispfx.load(tmp_path / "out")(ids), expected(ids)) <= 1e-5


def fail(*_: Any) -> dict[str, Tensor]:
    raise KeyError("a fault of lowering")


def test_inspect_shows_a_fault_of_a_later_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lower_gates, "count_sizes", fail)
    with pytest.raises(PassError, match="lower-gates"):
        api.inspect(one_branch(lambda: Middle(lambda m, h: F.gelu(h))))


def test_a_decoder_without_values_is_lowered_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config: Any = tiny_transformer("llama").config
    config.save_pretrained(tmp_path)
    assert api.inspect(str(tmp_path), config_only=True).sites
    monkeypatch.setattr(lower_gates, "count_sizes", fail)
    with pytest.raises(PassError, match="lower-gates"):
        api.inspect(str(tmp_path), config_only=True)


def test_large_decoders_are_lowered_without_their_weights(monkeypatch: pytest.MonkeyPatch):
    model = one_branch(lambda: Middle(lambda m, h: h[..., m.order]))
    program, devices = dispfx.capture(model), []

    def watched(program: Any, plan: Any, write: Any) -> Any:
        devices.append({tensor.device.type for tensor in program.parameters.values()})
        return lower_program(program, plan, write=write)

    monkeypatch.setattr(rehearsal, "_COMPARED_BYTES", 0)
    monkeypatch.setattr(rehearsal, "lower_program", watched)
    rehearse(source_of(model), program, Budget(0.3))
    assert devices == [{"meta"}, {"meta"}]
    assert {tensor.device.type for tensor in program.parameters.values()} == {"cpu"}


def test_numbers_that_differ_are_found_before_learning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def damaged(program: Any, plan: Any, write: Any = "index-add") -> Any:
        lowered = lower_program(program, plan, write=write)
        lowered.graph_module.get_parameter("mlp.down.weight").data.mul_(2)
        return lowered

    monkeypatch.setattr(rehearsal, "lower_program", damaged)
    with pytest.raises(VerificationError):
        compiled(one_branch(lambda: Middle(lambda m, h: F.gelu(h))), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def inverse_error_function(middle: Middle, hidden: Tensor) -> Tensor:
    return torch.erfinv(0.9 * torch.tanh(hidden))


def test_an_operation_without_an_onnx_form_is_refused_before_learning(tmp_path: Path):
    model = one_branch(lambda: Middle(inverse_error_function, up=96, down=96))
    with pytest.raises(UnsupportedGraphError, match=r"no ONNX form for aten\.erfinv") as refusal:
        compiled(model, tmp_path / "out", export="onnx")
    assert refusal.value.exit_code == 2 and str(refusal.value.where).split(":")[0].endswith("one_branch.py")
    assert "`export='none'`" in str(refusal.value)
    assert not list(tmp_path.iterdir()), "nothing was learned"
    assert all(line.holds for line in compiled(model, tmp_path / "out", export="none").verify)


def rotated(middle: Middle, hidden: Tensor) -> Tensor:
    turned = torch.view_as_complex(hidden.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(1), torch.ones(1))
    return torch.view_as_real(turned.unsqueeze(0).squeeze(0)).flatten(-2)


def test_an_operation_on_complex_numbers_is_said_to_be_one(tmp_path: Path):
    model = one_branch(lambda: Middle(rotated, up=96, down=96))
    with pytest.raises(UnsupportedGraphError, match=r"no ONNX form for aten\.\w+ of complex64 numbers"):
        compiled(model, tmp_path / "out", export="onnx")


@pytest.mark.parametrize("middle", [inverse_error_function, lambda m, h: F.gelu(h)])
def test_a_large_decoder_is_translated_without_its_weights(middle: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rehearsal, "_COMPARED_BYTES", 0)
    model = one_branch(lambda: Middle(middle))
    refused = pytest.raises(UnsupportedGraphError, match="erfinv")
    with refused if middle is inverse_error_function else nullcontext():
        rehearse(source_of(model), dispfx.capture(model), Budget(0.3), "onnx")


@pytest.mark.slow
def test_tokens_cut_into_chunks_by_unfold_compile_to_onnx(tmp_path: Path):
    """torch traces the chunks of 4 tokens for no text that is shorter, so nothing may run at 2 tokens."""

    model: Any = one_branch(lambda: Middle(lambda m, h: F.gelu(h), up=96, down=96))
    model.end = lambda decoder, x: decoder.head(F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).mean(-1))
    report = compiled(model, tmp_path / "out", export="onnx")
    lines = [line for line in report.verify if line.name.startswith("onnx")]
    assert lines and all(line.holds for line in lines)


def source_of(model: nn.Module, config: Any = None) -> Any:
    return SimpleNamespace(model=model, config=config)


def test_a_dense_checkpoint_of_a_decoder_with_statistics_of_weights_is_refused():
    model = one_branch(lambda: ChangedMiddle(ternary))
    with pytest.raises(UnsupportedGraphError, match="`export='dense'`"):
        rehearse(source_of(model), dispfx.capture(model), Budget(0.3), "dense")


def test_the_random_plan_removes_the_share_of_every_site():
    program = dispfx.capture(one_branch(lambda: Middle(lambda m, h: F.gelu(h))))
    plan = random_plan(program, Budget(0.25))
    assert {name: len(kept) for name, kept in plan.kept.items()} == {
        site.name: round(0.75 * site.size) for site in program.sites
    }
    assert all(torch.equal(kept, kept.unique()) for kept in plan.kept.values())
