"""align-groups: grouped products of odd widths are padded to what their kernel takes, and no other."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

import dispfx
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.align_groups import AlignGroups
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.lower_gates import LowerGates
from dispfx.plan.plan import Plan
from tests.passes.golden import calls_of
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

VOCABULARY, WIDTH, INNER = 61, 32, 48


def mixture(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return perturb(AutoModelForCausalLM.from_config(config)).to(dtype)


@pytest.fixture(scope="module")
def half() -> Program:
    return dispfx.capture(mixture(torch.bfloat16))


def lowered(program: Program, widths: dict[str, int]) -> Program:
    """Lower a program whose sites of the mixture keep the first so many features, each expert of its own."""
    selections = {}
    for site in program.sites:
        width = widths.get(site.kind, site.per_expert) if site.branch_kind == "mlp" else site.per_expert
        starts = torch.arange(0, site.size, site.per_expert, dtype=torch.int32)
        selections[site.name] = (starts[:, None] + torch.arange(width, dtype=torch.int32)).flatten()
    return Pipeline([InsertGates(), LowerGates(selections)]).run(program.clone())


def test_odd_widths_get_zeros_behind_them(half: Program):
    """Rules 1 and 3."""
    program = lowered(half, {"read": 21, "inner": 30, "write": 19})
    Pipeline([AlignGroups()]).run(program)
    assert calls_of(program, "_grouped_mm").count("\n") == 1
    assert calls_of(program, "constant_pad_nd").splitlines() == [
        # rows of 21 features, a stack 21 × 60, rows of 30 features, a stack 30 × 19
        line for line in calls_of(program, "constant_pad_nd").splitlines()
        if any(end in line for end in ("[0, 3])", "[0, 4, 0, 3])", "[0, 2])", "[0, 5, 0, 2])"))
    ]  # fmt: skip
    assert calls_of(program, "constant_pad_nd").count("\n") == 3
    shapes = {path: tuple(tensor.shape) for path, tensor in program.parameters.items()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (4, 60, 21)
    assert shapes["model.layers.0.mlp.experts.down_proj"] == (4, 19, 30)


def test_the_padded_decoder_is_the_gated_one(half: Program):
    for seed in range(3):
        plan = Plan.random(half, 0.4, seed)
        assert "constant_pad_nd" in str(dispfx.lower(half, plan).graph)
        ids = token_ids(2, 9, vocabulary=VOCABULARY)
        # bfloat16 rounds every product to 8 bits.
        assert relative_error(dispfx.lower(half, plan)(ids), dispfx.gated(half, plan)(ids)) <= 2**-6


def test_widths_that_the_kernel_takes_are_left_alone(half: Program):
    """Rule 2."""
    program = lowered(half, {"read": 24, "inner": 32, "write": 16})
    pipeline = Pipeline([AlignGroups(), AlignGroups()])
    pipeline.run(program)
    assert [ran.result.changed for ran in pipeline.ran] == [False, False]


def test_a_second_run_changes_nothing(half: Program):
    pipeline = Pipeline([AlignGroups(), AlignGroups()])
    pipeline.run(lowered(half, {"read": 21}))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]


def test_products_of_another_kernel_are_left_alone():
    """Rule 2."""
    program = lowered(dispfx.capture(mixture(torch.float32)), {"read": 21, "inner": 30, "write": 19})
    assert "grouped_mm_fallback" in str(program.graph)
    pipeline = Pipeline([AlignGroups()])
    pipeline.run(program)
    assert not pipeline.ran[0].result.changed
