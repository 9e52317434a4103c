"""Estimates against what a step really takes, and what they are made of."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from dispfx.api import capture
from dispfx.estimate.devices import CARDS, Device, this_cpu
from dispfx.estimate.run_estimate import Estimate, estimate
from dispfx.estimate.step_work import StepWork
from dispfx.ir.program import Program
from dispfx.learning.hypernetwork import build_hypernetwork, hypernetwork_parameters
from dispfx.settings.learning_settings import LearnSettings
from tests.measure.live_memory import peak_of_a_step
from tests.plain_decoders import FORMS, INNER, VOCABULARY, WIDTH, build
from tests.programs import program_of
from tests.tiny_transformers import tiny_transformer

PLAIN = ("pre-norm", "fused-qkv", "layer-norm-with-bias")
TRANSFORMERS = ("llama", "gpt2", "gemma2", "mixtral", "qwen3")

# Plain decoders have so many positions.
LONGEST = 64
# What the estimate promises of a whole process (docs/trust.md), and of a step alone.
TOLERANCE = 0.25


@cache
def program(name: str) -> Program:
    return program_of(name, layers=3) if name in FORMS else capture(tiny_transformer(name))


def estimated(name: str, batch: int = 2, tokens: int = 48, **settings: Any) -> Estimate:
    return estimate(program(name), LearnSettings(batch_size=batch, seq_len=tokens, **settings))


@pytest.mark.parametrize("name", [*PLAIN, *TRANSFORMERS])
@pytest.mark.parametrize("shape", [(1, 160, 1), (4, 24, 1), (4, 48, 2)], ids=str)
def test_the_memory_of_a_step_is_about_what_torch_really_holds(name: str, shape: tuple[int, int, int]):
    batch, tokens, samples = shape
    tokens = min(tokens, LONGEST) if name in PLAIN else tokens
    settings = LearnSettings(batch_size=batch, seq_len=tokens, samples=samples)
    measured = peak_of_a_step(program(name), settings)
    found = estimate(program(name), settings).step.bytes()
    assert abs(found / measured - 1) < TOLERANCE, f"{found} estimated, {measured} measured"


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_the_memory_of_a_step_with_checkpoints_is_about_what_torch_really_holds(name: str):
    settings = LearnSettings(batch_size=4, seq_len=96)
    measured = peak_of_a_step(program(name), settings, checkpointing="on")
    found = estimate(program(name), settings).step.bytes(checkpoints=True)
    assert abs(found / measured - 1) < TOLERANCE, f"{found} estimated, {measured} measured"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_estimate_needs_no_values(name: str):
    with_values = estimated(name)
    without = estimate(capture(tiny_transformer(name).to("meta")), with_values.settings)
    assert without.place == "cuda" and without.free_bytes is None
    assert replace(without, place="cpu", free_bytes=with_values.free_bytes) == with_values


def test_logits_dominate_where_the_vocabulary_is_large():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = build(FORMS["pre-norm"], layers=1)
            self.decoder.head = nn.Linear(WIDTH, 4096, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.decoder(ids)

    found = estimate(capture(Wide().eval()), LearnSettings(batch_size=2, seq_len=32))
    # Logits, and three float32 numbers for each.
    assert found.step.loss == pytest.approx(4 * 4 * 2 * 32 * 4096, rel=0.02)
    assert found.step.bytes() == found.step.kept + found.step.loss


def test_operations_are_those_of_the_products():
    """Two rows a weight forward; back the same for each product that a gate stands before."""
    tokens, batch, layers = 16, 2, 3
    found = estimated("pre-norm", batch, tokens).work
    rows = batch * tokens
    layer = 2 * rows * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
    attention = 4 * batch * tokens * tokens * WIDTH
    head = 2 * rows * WIDTH * VOCABULARY
    assert found.forward == layers * (layer + attention) + head
    assert found.backward == layers * (layer + attention * 5 // 2) + head


def test_memory_and_work_grow_with_batch_and_length():
    small, batch, long = (estimated("llama", *shape) for shape in ((1, 32), (2, 32), (1, 64)))
    assert small.step.kept < batch.step.kept < 2.001 * small.step.kept
    assert batch.step.kept < long.step.kept, "an attention's mask grows with the square of the length"
    assert batch.work.forward < long.work.forward
    # Older versions compute the angles of all positions once a batch, by a product.
    assert batch.work.forward == pytest.approx(2 * small.work.forward, rel=1e-3)


def test_weights_are_counted_by_dtype_and_tied_ones_once():
    model = build(FORMS["tied-embeddings"])
    found = estimate(capture(model.to(torch.bfloat16)), LearnSettings(seq_len=8))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.weight_bytes_by_dtype == {"bfloat16": 2 * found.parameters}
    assert found.weight_bytes == 2 * found.parameters and found.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["full", "linear", "none"])
def test_the_hypernetwork_is_counted_without_being_built(kind):
    sizes = [8, 8, 24, 5]
    built = build_hypernetwork(kind, sizes, bias=3.0, seed=0)
    assert hypernetwork_parameters(kind, sizes) == sum(p.numel() for p in built.parameters())


def test_a_smaller_hypernetwork_and_shared_selections_take_less():
    chosen: list[dict[str, Any]] = [
        {},
        {"hypernetwork": "linear"},
        {"hypernetwork": "none"},
        {"constrained": True},
    ]
    full, linear, none, shared = (estimated("llama", **one).hypernetwork_bytes for one in chosen)
    assert none < linear < full and shared < full


def test_a_process_holds_more_than_its_tensors():
    found = estimated("llama", 1, 2)
    step = found.step
    assert found.beside_weights() == int(found.hypernetwork_bytes + 1.6 * step.bytes()) + 10_000_000
    assert found.peak_bytes == found.weight_bytes + found.beside_weights()
    on_gpu = int(found.hypernetwork_bytes + 1.15 * step.bytes(compiled=True)) + 300_000_000
    assert found.beside_weights("cuda", compiled=True) == on_gpu
    assert step.bytes(compiled=True) == step.kept // 2 + max(step.loss, step.gradients)


def test_what_fits_is_said_by_the_bytes_beside_the_weights():
    found = estimated("llama", 8, 128)
    whole, least = found.beside_weights(), found.beside_weights(checkpoints=True)
    assert least < whole
    assert found.fits(whole) == "fits"
    assert found.fits(whole - 1) == found.fits(least) == "fits with checkpoints"
    assert found.fits(least - 1) == "does not fit"
    assert found.free_bytes is not None and found.fits(found.free_bytes) == "fits"


def test_time_is_operations_over_the_rate_that_is_reached_and_what_steps_take_beside_them():
    found = estimated("llama", accumulate=3, steps=7)
    device = Device("fast", {torch.float32: 1e9}, efficiency=0.25, seconds_a_step=2.0, seconds_a_branch=0.5)
    assert found.flops_a_step == 3 * found.work.total
    branches = len(program("llama").branches)
    expected = found.flops_a_step / 0.25e9 + 2.0 + 3 * 0.5 * branches
    assert found.seconds_a_step(device) == pytest.approx(expected)
    assert found.seconds(device) == 7 * found.seconds_a_step(device)


@pytest.mark.parametrize("objective", ["kl", "mix"])
def test_the_dense_decoder_predicts_too_for_kl(objective: str):
    plain, found = estimated("llama"), estimated("llama", objective=objective)
    assert found.flops_a_step == plain.flops_a_step + plain.work.forward


@pytest.mark.parametrize("device", [*CARDS.values(), this_cpu(torch.float32)], ids=lambda one: one.name)
def test_no_step_is_promised_in_less_than_its_overhead(device: Device):
    """Measured without a decoder: 1.8 ms on an H200; the demo takes 28 ms on a CPU at 1 × 8 tokens."""
    found = estimated("llama", 1, 2)
    assert found.seconds_a_step(device) > 1.8e-3 + 0.1e-3 * found.branches


@pytest.mark.parametrize(
    ("flops", "branches", "measured"),
    [(4.23e12, 60, 0.0173), (6.44e12, 60, 0.0219), (61.8e12, 64, 0.102)],
    ids=["SmolLM2-135M at 2 × 2048", "SmolLM2-135M at 8 × 1024", "LLaMA-2-7B at 1 × 2048"],
)
def test_the_rates_of_an_h200_give_the_times_that_were_measured_on_one(
    flops: float, branches: int, measured: float
):
    work = StepWork(forward=0, backward=int(flops))
    settings = LearnSettings(batch_size=1, seq_len=32)
    found = replace(estimated("llama"), settings=settings, work=work, branches=branches, dtype=torch.bfloat16)
    assert found.seconds_a_step(CARDS["H200"]) == pytest.approx(measured, rel=0.25)


def test_a_dtype_without_a_rate_of_its_own_takes_the_slowest():
    card = CARDS["A100"]
    assert card.seconds(1e12, torch.float64) == card.seconds(1e12, torch.float32)
    assert card.seconds(1e12, torch.bfloat16) < card.seconds(1e12, torch.float32)


def test_this_cpu_is_timed():
    assert 1e7 < this_cpu(torch.float32).flops_per_second[torch.float32] < 1e14


def test_an_estimate_leaves_the_program_alone():
    before = [node.name for node in program("llama").graph.nodes]
    estimated("llama")
    assert [node.name for node in program("llama").graph.nodes] == before
