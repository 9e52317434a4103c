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
        dtype=torch.bfloat16,
        parameters=70 * GIGA,
        gated_parameters=63 * GIGA,
        weight_bytes=weights,
        weight_bytes_by_dtype={"bfloat16": weights},
        hypernetwork_parameters=500_000_000,
        features=10_000_000,
        step=StepMemory(kept=20 * GIGA, loss=2 * GIGA, peak=22 * GIGA),
        work=StepWork(forward=flops // 2, backward=flops // 2),
    )


def test_memory_is_one_line_with_its_parts():
    share, memory, *_ = estimate_lines(estimate())
    assert share == "63,000,000,000 of 70,000,000,000 parameters are gated (90.0%)"
    assert memory == (
        "learning at 1 × 2048 tokens is estimated to take 168.3 GB: weights 140.0 GB, hypernetwork 6.3 GB, "
        "one step 22.0 GB"
    )


def test_on_a_gpu_the_workspaces_are_a_part():
    found = replace(estimate(), on_gpu=True, workspace_bytes=200_000_000)
    assert ", hypernetwork 8.5 GB, cuBLAS 200.0 MB, one step 22.0 GB" in estimate_lines(found)[1]
    assert estimate_plain(found)["bytes"]["workspaces"] == 200_000_000


def test_each_card_says_how_long_and_how_many():
    lines = estimate_lines(estimate())
    assert "  H100: 7.6 h on one for 10,000 steps; needs the memory of at least 3 (80 GB)" in lines
    assert "  H200: 7.6 h on one for 10,000 steps; needs the memory of at least 2 (141 GB)" in lines
    small = estimate_lines(estimate(weights=GIGA))
    assert any(line.startswith("  H100") and "fits on one (80 GB)" in line for line in small)


@pytest.mark.parametrize(
    ("flops", "said"), [(10**18, "316.3 days"), (10**15, "7.6 h"), (10**13, "4.6 min"), (10**12, "27.3 s")]
)
def test_a_time_is_said_in_the_unit_that_suits_it(flops: int, said: str):
    assert any(f"H100: {said} on one" in line for line in estimate_lines(estimate(flops=flops)))


def test_small_sizes_are_said_in_megabytes():
    assert "weights 3.0 MB" in estimate_lines(estimate(weights=3_000_000))[1]


def test_programs_get_bytes_and_seconds():
    plain = estimate_plain(estimate())
    assert plain["bytes"]["peak"] == sum(plain["bytes"][part] for part in ("weights", "hypernetwork", "step"))
    assert plain["bytes"]["kept_for_backward"] == 20 * GIGA and plain["gated_parameters"] == 63 * GIGA
    assert plain["seconds"]["H100"] == pytest.approx(10_000 * plain["flops_a_step"] / (0.37 * 989e12))


def test_lines_are_printed_whole_and_without_markup():
    stream = io.StringIO()
    print_estimate(estimate(), Console(file=stream, width=40))
    assert stream.getvalue().splitlines() == estimate_lines(estimate())
