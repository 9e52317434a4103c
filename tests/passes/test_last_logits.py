"""last-logits: the head reads the last token alone."""

import pytest
import torch

import dispfx
from dispfx.compiler.programs import lower_program
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.last_logits import LastLogits
from dispfx.plan.plan import Plan
from tests.one_branch import VOCABULARY, Middle, OneBranch
from tests.passes.golden import calls_of, names_of
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids


def lowered(way) -> Program:
    torch.manual_seed(0)
    program = dispfx.capture(
        perturb(OneBranch(Middle(lambda m, h: torch.relu(h)), lambda m, x: way(m.head(x))))
    )
    return lower_program(program, Plan.random(program, 0.2, seed=0))


@pytest.mark.parametrize("way", [lambda x: x, lambda x: 30.0 * torch.tanh(x / 30.0)])
def test_the_head_reads_the_last_token(way):
    """Rule 1."""
    program = lowered(way)
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    Pipeline([LastLogits()]).run(program)
    assert calls_of(program, "slice").endswith("1, -1, 9223372036854775807): (B, 1, 16) float32")
    after = program.graph_module(ids)
    assert after.shape == (2, 1, VOCABULARY)
    # One row may run in another kernel than many.
    assert relative_error(after, before[:, -1:]) <= 1e-6


@pytest.mark.parametrize("way", [lambda x: x - x.mean(1, keepdim=True), lambda x: x.cumsum(1)])
def test_logits_that_mix_tokens_are_left_alone(way):
    """Rule 1."""
    program = lowered(way)
    names = names_of(program)
    pipeline = Pipeline([LastLogits()])
    pipeline.run(program)
    assert not pipeline.ran[0].result.changed and names_of(program) == names


def test_a_second_run_changes_nothing():
    """Rule 2."""
    pipeline = Pipeline([LastLogits(), LastLogits()])
    pipeline.run(lowered(lambda x: x))
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
