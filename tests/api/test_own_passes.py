"""Passes and training loops of one's own, around those of dispfx."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.errors import CaptureError, DataError, DispfxError, PassError
from dispfx.ir.ops import aten, packet
from dispfx.ir.pipeline import PassResult
from tests.plain_decoders import FORMS, build
from tests.programs import program_of, token_ids


@dataclass
class DoubleLogits:
    """Multiply the logits by two."""

    name: str = "double-logits"
    requires: str = "canonical"
    ensures: str = "canonical"
    changed: bool = True

    def run(self, program: dispfx.Program) -> PassResult:
        output = program.graph.output_node()
        logits = output.all_input_nodes[0]
        with program.graph.inserting_after(logits):
            twice = program.graph.call_function(aten.mul.Tensor, (logits, 2.0))
        twice.meta = dict(logits.meta)
        output.replace_input_with(logits, twice)
        program.rebuild(dict(program.tensors()))
        return PassResult(self.changed, "logits are doubled")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build(FORMS["fused-gate-up"], layers=1)


@pytest.fixture(scope="module")
def program() -> dispfx.Program:
    return program_of("fused-gate-up", layers=1)


def test_a_pass_runs_after_the_analysis_and_lowers_with_the_rest(model: nn.Module):
    program = dispfx.capture(model, passes=[DoubleLogits()])
    ids = token_ids(2, 7)
    assert torch.equal(program.graph_module(ids), 2.0 * model(ids))
    lowered = dispfx.lower(program, dispfx.Plan.random(program, 0.0, 0))
    assert torch.equal(lowered(ids), 2.0 * model(ids))


def test_a_pass_runs_after_the_lowering(program: dispfx.Program):
    plan, ids = dispfx.Plan.random(program, 0.3, 0), token_ids(2, 7)
    step = DoubleLogits(requires="lowered", ensures="lowered")
    doubled = dispfx.lower(program, plan, passes=[step])
    assert torch.equal(doubled(ids), 2.0 * dispfx.lower(program, plan)(ids))
    assert sum(packet(node) is aten.mul and node.args[1] == 2.0 for node in doubled.graph.nodes) == 1


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (
            [DoubleLogits(name="align-groups", requires="lowered", ensures="lowered")],
            "'align-groups' is taken",
        ),
        ([DoubleLogits(requires="lowered", ensures="lowered")] * 2, "'double-logits' is taken"),
        ([DoubleLogits()], "must require and ensure a lowered program"),
        ([DoubleLogits], "DoubleLogits was given"),
        ([lambda program: None], "a pass is an object with name, requires, ensures and run"),
    ],
)
def test_a_pass_that_cannot_run_there_is_refused(program: dispfx.Program, passes: Any, message: str):
    with pytest.raises(DispfxError, match=message):
        dispfx.lower(program, dispfx.Plan.random(program, 0.3, 0), passes=passes)


def test_a_pass_that_is_wrong_is_not_called_a_fault_of_dispfx(program: dispfx.Program):
    step = DoubleLogits(requires="lowered", ensures="lowered", changed=False)
    with pytest.raises(PassError, match="claims changed=False") as error:
        dispfx.lower(program, dispfx.Plan.random(program, 0.3, 0), passes=[step])
    assert error.value.hint == f"this pass is not part of dispfx: see {__name__}.DoubleLogits"


def test_capture_says_what_it_takes_and_reads_one_pattern_as_one(model: nn.Module):
    with pytest.raises(CaptureError, match=r"capture takes an nn\.Module, but 'demo' was given"):
        dispfx.capture("demo")  # type: ignore[arg-type]
    program = dispfx.capture(model, skip="*mlp*")
    assert {branch.kind for branch in program.branches} == {"attention"}


def test_soft_and_hard_masks_train_in_a_loop_of_ones_own(program: dispfx.Program):
    decoder, ids = dispfx.gate(program), token_ids(2, 9)
    plan = dispfx.Plan.random(program, 0.3, 0)
    hard = {name: torch.zeros(program.site(name).size) for name in plan.kept}
    for name, kept in plan.kept.items():
        hard[name][kept.long()] = 1.0
    assert torch.equal(decoder(ids, hard), dispfx.gated(program, plan)(ids))
    assert torch.equal(decoder(ids, {}), program.graph_module(ids))
    logits: dict[str, Tensor] = {
        site.name: torch.full((site.size,), 3.0, requires_grad=True) for site in program.sites
    }
    loss = decoder(ids, {name: values.sigmoid() for name, values in logits.items()}).logsumexp(-1).mean()
    loss.backward()
    assert all(values.grad is not None and bool(values.grad.any()) for values in logits.values())
    with pytest.raises(DispfxError, match=r"did you mean layers\.0\.mlp\.inner"):
        decoder(ids, {"layers.0.mlp.iner": torch.ones(48)})


def test_lists_and_arrays_of_ids_are_learned_from_as_tensors_are(program: dispfx.Program):
    ids = token_ids(1, 400)[0]
    plans = [
        dispfx.learn(program, data, 0.3, steps=1, seq_len=8, batch_size=2)
        for data in (ids, ids.numpy(), ids.tolist())
    ]
    assert plans[0] == plans[1] == plans[2]
    with pytest.raises(DataError, match=r"token ids must be in \[0, 61\) for this decoder, found 61"):
        dispfx.learn(program, [*ids.tolist(), 61], 0.3, steps=1)
