"""`inspect`: what can be pruned in a decoder."""

from typing import Any

from dispfx.analysis.finite_weights import require_finite_weights
from dispfx.compiler.programs import analyse
from dispfx.ir.program import Program
from dispfx.plan.budget import Budget
from dispfx.run.opening import open_model
from dispfx.run.rehearsal import rehearse
from dispfx.settings import RunSettings
from dispfx.settings.verb_settings import INSPECTED_RATIO
from dispfx.source import config_alone, load_config


def inspect(model: Any, *, config_only: bool = False, **changes: Any) -> Program:
    """Return what can be pruned in a decoder, and what is refused and why.

    Args:
        model: MODEL, a module, a config.json, or `RunSettings`.
        config_only: read no weights, which is also the case for a config alone.  The graph
            is then not compared with the decoder (`Program.measured`).
        changes: settings of model and budget by their names in `RunSettings`, as in `skip=["*.mlp"]`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        SourceError: if a weight contains NaN or infinity.
        CaptureError, UnsupportedGraphError: if nothing can be pruned.
        DispfxError: whatever a compile would raise after learning (`dispfx.run.rehearsal`).
    """
    settings = RunSettings.given(model, {"ratio": INSPECTED_RATIO} | changes)
    chosen = settings.model
    if isinstance(chosen.model, str) and (config_only or config_alone(chosen.model)):
        source = load_config(
            chosen.model,
            revision=chosen.revision,
            dtype=chosen.dtype,
            trust_remote_code=chosen.trust_remote_code,
        )
    else:
        source = open_model(chosen)
        require_finite_weights(source.model)
    program = analyse(source.model, skip=settings.budget.skip, select=settings.budget.select)
    rehearse(source, program, Budget(settings.budget.ratio))
    return program
