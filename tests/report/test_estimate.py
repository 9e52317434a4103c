"""What is said about the cost of learning."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from dispfx.estimate.run_estimate import Estimate
from dispfx.estimate.step_memory import StepMemory
from dispfx.estimate.step_work import StepWork
from dispfx.report.estimate import estimate_lines, estimate_plain, print_estimate
from dispfx.settings.learning_settings import LearnSettings

GIGA = 10**9


def estimate(weights: int = 140 * GIGA, flops: int = 10**15) -> Estimate:
    """What a decoder of 70B parameters may take."""
    return Estimate(
        settings=LearnSettings(),
        place="cuda",
        dtype=torch.bfloat16,
        parameters=70 * GIGA,
        gated_parameters=63 * GIGA,
        weight_bytes=weights,
        weight_bytes_by_dtype={"bfloat16": weights},
        hypernetwork_parameters=500_000_000,
        features=10_000_000,
        branches=160,
        step=StepMemory(20 * GIGA, loss=2 * GIGA, gradients=GIGA, streams=3 * GIGA, layers=20),
        work=StepWork(forward=flops // 2, backward=flops // 2),
    )


def test_memory_is_one_line_with_its_parts():
    share, memory, *_ = estimate_lines(estimate())
    assert share == "63,000,000,000 of 70,000,000,000 parameters are gated (90.0%)"
    assert memory == (
        "learning at 1 × 2048 tokens takes about 162.6 GB: weights 140.0 GB, hypernetwork 8.5 GB, "
        "the rest for a step"
    )


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (23, "fits here (23.0 GB free)"),
        (16, "fits with checkpoints here (16.0 GB free)"),
        (9, "does not fit here (9.0 GB free)"),
    ],
)
def test_a_device_says_whether_learning_fits_beside_the_weights(free: int, said: str):
    """22.6 GB are needed beside the weights: 8.5, 0.3 and 1.15 · 12 for a step; 1.15 · 5 with checkpoints."""
    found = replace(estimate(), free_bytes=free * GIGA)
    assert estimate_lines(found)[1].endswith(f"for a step; {said}")
    assert f"{estimate_plain(found)['fits']} here" in said


def test_each_card_says_how_long_and_how_many():
    lines = estimate_lines(estimate())
    assert "  H100: about 5.0 h on one for 10,000 steps; needs the memory of at least 2 (80 GB)" in lines
    least = estimate_lines(estimate(weights=125 * GIGA))
    assert any("H200" in line and "fits on one with checkpoints (141 GB)" in line for line in least)
    small = estimate_lines(estimate(weights=GIGA))
    assert any(line.startswith("  H100") and "fits on one (80 GB)" in line for line in small)


@pytest.mark.parametrize(
    ("flops", "said"), [(10**18, "205.3 days"), (10**15, "5.0 h"), (10**13, "7.3 min"), (10**12, "4.6 min")]
)
def test_a_time_is_said_in_the_unit_that_suits_it(flops: int, said: str):
    assert any(f"H100: about {said} on one" in line for line in estimate_lines(estimate(flops=flops)))


def test_small_sizes_are_said_in_megabytes():
    assert "weights 3.0 MB" in estimate_lines(estimate(weights=3_000_000))[1]


def test_programs_get_bytes_and_seconds():
    plain = estimate_plain(estimate())
    found = plain["bytes"]
    step = 0.5 * found["kept_for_backward"] + 2 * GIGA  # compiled
    assert found["peak"] == pytest.approx(found["weights"] + found["hypernetwork"] + 1.15 * step + 0.3 * GIGA)
    assert found["peak_with_checkpointing"] < found["peak"] and found["step"] == 22 * GIGA
    assert found["free"] is None and plain["fits"] is None
    assert found["kept_for_backward"] == 20 * GIGA and plain["gated_parameters"] == 63 * GIGA
    step_seconds = plain["flops_a_step"] / (0.57 * 989e12) + 1.8e-3 + 160 * 0.15e-3
    assert plain["seconds"]["H100"] == pytest.approx(10_000 * step_seconds)


def test_lines_are_printed_whole_and_without_markup():
    stream = io.StringIO()
    print_estimate(estimate(), Console(file=stream, width=40))
    assert stream.getvalue().splitlines() == estimate_lines(estimate())
