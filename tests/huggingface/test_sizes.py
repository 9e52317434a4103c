"""What stacked experts are padded by at the widths of real mixtures, counted from shapes without a weight.

Experts allocate their output as wide as their input, so both get the wider one of the two, in eights.
"""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from dispfx.analysis.positions import places
from dispfx.api import capture
from dispfx.huggingface.planning import Planned, plan_modules, site_cuts
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan

pytestmark = pytest.mark.slow

# One layer each, which all others are like, and nearly no embedding, which is never padded.
MIXTURES = {
    "mixtral": lambda: MixtralConfig(
        num_hidden_layers=1, hidden_size=4096, intermediate_size=14336, vocab_size=64
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        num_hidden_layers=1,
        vocab_size=64,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        decoder_sparse_step=1,
    ),
}


@pytest.fixture(scope="module", params=list(MIXTURES))
def mixture(request: pytest.FixtureRequest) -> tuple[Program, Any]:
    """A layer of a real mixture on the meta device, and its program."""
    config: PreTrainedConfig = MIXTURES[request.param]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return capture(model), model


def planned(program: Program, model: Any, shares: dict[str, float], odd: bool) -> tuple[Planned, Plan]:
    """Plan the modules for a plan that keeps a share of each kind of site, in eights or in odd numbers."""
    kept = []
    for number, site in enumerate(program.sites):
        width = int(shares[site.kind] * site.per_expert) // 8 * 8 + (1 + 2 * (number % 3) if odd else 0)
        first_of_expert = torch.arange(0, site.size, site.per_expert)[:, None]
        kept.append((first_of_expert + torch.arange(width)).flatten().to(torch.int32))
    plan = Plan.of(program, Budget(0.5, "blocks", 1), kept, 0)
    found = plan_modules(program, plan.kept, model)
    assert isinstance(found, Planned), found
    return found, plan


def excess(mixture: tuple[Program, Any], shares: dict[str, float], *, odd: bool = False) -> float:
    """Return by which share the stored numbers exceed kept weights, the rest and indices."""
    program, model = mixture
    found, plan = planned(program, model, shares, odd)
    stays = site_cuts(program.sites, plan.kept)
    stored = expected = sum(index.numel() for index in found.indices.values())
    for path, parameter in model.named_parameters():
        for positions, count in ((found.kept, "stored"), (stays, "expected")):
            shape = list(parameter.shape)
            for axis in range(len(shape)):
                if (path, axis) in positions:
                    own = positions[path, axis]
                    shape[axis] = (own if count == "stored" else places(own)).shape[-1]
            if count == "stored":
                stored += math.prod(shape)
            else:
                expected += math.prod(shape)
    return stored / expected - 1


def test_widths_in_eights_that_are_alike_cost_nothing(mixture: tuple[Program, Any]):
    for share in (0.9, 0.5, 0.3):
        assert excess(mixture, {"read": share, "write": share, "inner": share}) == 0


def test_odd_widths_cost_what_the_next_eight_costs(mixture: tuple[Program, Any]):
    program, _ = mixture
    inner, read = (next(s for s in program.sites if s.kind == kind).per_expert for kind in ("inner", "read"))
    for share in (0.9, 0.5, 0.3):
        found = excess(mixture, {"read": share, "write": share, "inner": share}, odd=True)
        assert 0 < found < (1 + 8 / (share * inner)) * (1 + 8 / (share * read)) - 1
        assert found < (0.01 if inner > 10_000 else 0.04)


def test_reads_and_writes_of_unlike_widths_are_stored_as_the_wider_one(mixture: tuple[Program, Any]):
    # Two thirds of an expert's weights have the features that it reads, a third those that it writes.
    narrow_reads = excess(mixture, {"read": 0.4, "write": 0.5, "inner": 0.5})
    narrow_writes = excess(mixture, {"read": 0.5, "write": 0.4, "inner": 0.5})
    assert 0.1 < narrow_reads < 0.5 / 0.4 - 1
    assert 0.05 < narrow_writes < narrow_reads
