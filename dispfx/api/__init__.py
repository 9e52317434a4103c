"""All of dispfx as functions: the command line and `import dispfx` are thin layers over this."""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispfx.analysis.coverage import coverage
    from dispfx.api.benching import bench
    from dispfx.api.commands import agree, evaluate, export, generate
    from dispfx.api.compilation import (
        apply,
        compile,
        follow_compile,
        learn_plan,
        run_apply,
        run_compile,
        run_learn,
    )
    from dispfx.api.costing import costs
    from dispfx.api.family_sizes import curve
    from dispfx.api.inspection import inspect, preview
    from dispfx.api.installation import doctor
    from dispfx.api.recovery import follow_recovery, recover, run_recover
    from dispfx.api.sampling import sample
    from dispfx.api.tasks import score_tasks
    from dispfx.compiler.cached_programs import capture_cached, lower_cached
    from dispfx.compiler.pipelines import PASSES
    from dispfx.compiler.programs import analyse, capture, gate, gated, lower, separate_documents
    from dispfx.estimate.run_estimate import estimate
    from dispfx.ir.cached_inputs import CachedDecoder
    from dispfx.run.fitting import settings_of
    from dispfx.run.folders import load
    from dispfx.run.mask_learning import learn, learn_family
    from dispfx.run.plan_learning import follow_command
    from dispfx.run.timed_stages import printing
    from dispfx.run.written_folder import verify
    from dispfx.settings import (
        BudgetSettings,
        ComputeSettings,
        LearnSettings,
        ModelSettings,
        OutputSettings,
        RunSettings,
        TextSettings,
        learn_settings,
    )

# Each name is imported from its module at first use, so that a command imports no more than it needs.
_NAMES = {
    "dispfx.analysis.coverage": "coverage",
    "dispfx.api.benching": "bench",
    "dispfx.api.commands": "agree evaluate export generate",
    "dispfx.api.compilation": "apply compile follow_compile learn_plan run_apply run_compile run_learn",
    "dispfx.api.costing": "costs",
    "dispfx.api.family_sizes": "curve",
    "dispfx.api.inspection": "inspect preview",
    "dispfx.api.installation": "doctor",
    "dispfx.api.recovery": "follow_recovery recover run_recover",
    "dispfx.api.sampling": "sample",
    "dispfx.api.tasks": "score_tasks",
    "dispfx.compiler.cached_programs": "capture_cached lower_cached",
    "dispfx.ir.cached_inputs": "CachedDecoder",
    "dispfx.compiler.programs": "analyse capture gate gated lower separate_documents",
    "dispfx.compiler.pipelines": "PASSES",
    "dispfx.estimate.run_estimate": "estimate",
    "dispfx.run.fitting": "settings_of",
    "dispfx.run.folders": "load",
    "dispfx.run.mask_learning": "learn learn_family",
    "dispfx.run.timed_stages": "printing",
    "dispfx.run.plan_learning": "follow_command",
    "dispfx.run.written_folder": "verify",
    "dispfx.settings": "BudgetSettings ComputeSettings LearnSettings ModelSettings "
    "OutputSettings RunSettings TextSettings learn_settings",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dispfx.api' has no attribute {name!r}")
    # torch and transformers make millions of objects that stay.  Looking through them again and again takes a
    # quarter of the import.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = globals()[name] = getattr(import_module(home), name)
    finally:
        if collects:
            gc.enable()
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
