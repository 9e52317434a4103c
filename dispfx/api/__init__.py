"""All of dispfx as functions: the command line and `import dispfx` are thin layers over this."""

from dispfx.analysis.coverage import coverage
from dispfx.api.bench import bench
from dispfx.api.commands import agree, evaluate, export, generate, inspect
from dispfx.api.compilation import apply, compile, learn_plan, run_apply, run_compile, run_learn
from dispfx.api.doctor import doctor
from dispfx.api.finetuning import finetune
from dispfx.api.preview import preview
from dispfx.api.tasks import score_tasks
from dispfx.compiler.cached_programs import CachedDecoder, capture_cached, lower_cached
from dispfx.compiler.programs import analyse, apart, capture, gate, gated, lower
from dispfx.compiler.stages import PASSES
from dispfx.estimate.run_estimate import estimate
from dispfx.run.fitting import settings_of
from dispfx.run.folders import load
from dispfx.run.mask_learning import learn
from dispfx.run.pass_printing import printing
from dispfx.run.plan_learning import follow_command
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

__all__ = [
    "PASSES",
    "BudgetSettings",
    "CachedDecoder",
    "ComputeSettings",
    "LearnSettings",
    "ModelSettings",
    "OutputSettings",
    "RunSettings",
    "TextSettings",
    "agree",
    "analyse",
    "apart",
    "apply",
    "bench",
    "capture",
    "capture_cached",
    "compile",
    "coverage",
    "doctor",
    "estimate",
    "evaluate",
    "export",
    "finetune",
    "follow_command",
    "gate",
    "gated",
    "generate",
    "inspect",
    "learn",
    "learn_plan",
    "learn_settings",
    "load",
    "lower",
    "lower_cached",
    "preview",
    "printing",
    "run_apply",
    "run_compile",
    "run_learn",
    "score_tasks",
    "settings_of",
    "verify",
]
