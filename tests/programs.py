"""Programs for tests: a decoder on its way through the passes."""

import torch
from torch import Tensor, nn

from dispfx.api import capture
from dispfx.capturing.module_capture import capture as capture_module
from dispfx.ir.pipeline import Pass, Pipeline
from dispfx.ir.program import Program
from dispfx.passes.canonicalize import Canonicalize
from dispfx.passes.find_branches import FindBranches
from dispfx.passes.find_residual_stream import FindResidualStream
from dispfx.passes.find_sites import FindSites
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.settings.sections import FurtherSites
from tests.plain_decoders import FORMS, VOCABULARY, build

_ANALYSIS: list[Pass] = [Canonicalize(), FindResidualStream(), FindBranches(), FindSites()]


def program_of(form: str, *, layers: int = 2, sites: tuple[FurtherSites, ...] = ()) -> Program:
    """Return the analysed program of a plain decoder."""
    return capture(build(FORMS[form], layers=layers), sites=sites)


def program_before(step: type, model: nn.Module | None = None) -> Program:
    """Return a program that has been through every pass of the analysis before `step`."""
    program = capture_module(model or build(FORMS["pre-norm"]))
    before = []
    for candidate in _ANALYSIS:
        if isinstance(candidate, step):
            break
        before.append(candidate)
    return Pipeline(before).run(program)


def token_ids(batch: int, tokens: int, *, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    """Return seeded token ids (B, T)."""
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def plan_keeping(program: Program, kept: dict[str, list[int]]) -> Plan:
    """Return a plan that keeps the named features at the named sites and everything elsewhere."""
    selections = [
        torch.tensor(kept.get(site.name, list(range(site.size))), dtype=torch.int32) for site in program.sites
    ]
    return Plan.of(program, Budget(0.0), selections, seed=0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|a − b| / max|b|."""
    a, b = actual.detach().double(), expected.detach().double()
    return float((a - b).abs().max() / b.abs().max())
