"""Recovery at the end of a compile: the pruned folder is a draft in DIR.state, from which DIR is made.

learn → plan → DIR.state/pruned, verified → training in DIR.state/recovery → DIR, verified
"""

from pathlib import Path

import torch

from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.distributed.ranks import Ranks
from dispfx.errors import DispfxError
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.run.length_checks import window_of
from dispfx.run.made_from import is_made_of_the_same
from dispfx.run.plan_learning import DRAFT, RECOVERY
from dispfx.run.recovery_job import Recovery, fitted_recovery
from dispfx.run.run_text import Text
from dispfx.settings import RunSettings
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.source import Source
from dispfx.source.own_code import is_own_code
from dispfx.words.option_names import option


def recovery_of_draft(
    recovery: RecoverySettings,
    state: Path,
    source: Source,
    program: Program,
    text: Text,
    path: Path,
) -> Recovery:
    """Return what is to be trained, and towards what, as every rank knows it."""
    return Recovery(
        folder=state / DRAFT,
        path=path,
        state=state / RECOVERY,
        dense=source,
        program=program,
        text=text,
        settings=fitted_recovery(recovery, source, program, text),
        context=window_of(source, program, None),
        base=source.name,
        own_code=is_own_code(source.model, source.config, source.tokenizer),
    )


def wait_for_draft(ranks: Ranks, program: Program) -> None:
    """Wait until the leading rank has written what all of them train."""
    with ranks.reaching():
        ranks.send(torch.zeros(1, device=program.device))


def is_of_plan(draft: Path, plan: Plan) -> bool:
    """Whether an earlier run has written the folder of a plan, from what this run works on."""
    if not (draft / "report.json").is_file():
        return False
    return is_made_of_the_same(Plan.load(draft / PLAN_FILE), plan)


def require_recoverable(settings: RunSettings) -> None:
    """Pass if the pruned decoder can be trained and written as asked, or shall not be trained.

    Raises:
        DispfxError: if weights are in parts, or a form is asked that is made from the dense weights.
    """
    if settings.recovery is None:
        return
    if settings.compute.shard_on is not None:
        raise DispfxError(
            f"{option('recover')} trains whole weights, and with {option('shard')} each process has a part",
            hint=f"leave out {option('shard')}, or recover the folder later on one device",
        )
    if settings.output.export not in (None, "none", "onnx", "pt2"):
        raise DispfxError(
            f"{option('recover')} cannot be followed by {option('export', settings.output.export)}, "
            "which is made from the dense weights",
            hint=f"use {option('export', 'onnx')}, pt2 or none",
        )
