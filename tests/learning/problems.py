"""The problem that scores are measured on, of a program of a plain decoder."""

from typing import Any

from torch import fx

from dispfx.compiler.programs import gate
from dispfx.ir.program import Program
from dispfx.learning.learner import Problem
from dispfx.plan.budget import Budget
from dispfx.run.mask_learning import batches_of, task_of
from dispfx.settings import LearnSettings
from tests.programs import token_ids


def problem_of(program: Program, **changes: Any) -> tuple[Problem, fx.GraphModule]:
    """Return a problem of short sequences, and the gated graph."""
    settings = LearnSettings(**{"seq_len": 6, "batch_size": 2, **changes})
    gated = gate(program)
    text = batches_of(token_ids(1, 60)[0] % program.vocabulary_size, settings)
    return task_of(program, gated, text, Budget(0.3), settings).problem(), gated.graph
