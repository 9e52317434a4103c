"""Everything dispfx does, as functions: the command line and `import dispfx` are thin over this."""

from dispfx.api.bench import bench
from dispfx.api.cached import CachedDecoder, capture_cached, lower_cached
from dispfx.api.commands import agree, evaluate, export, generate, inspect, learn_plan
from dispfx.api.compilation import apply, compile
from dispfx.api.doctor import doctor
from dispfx.api.finetuning import finetune, tune_settings
from dispfx.api.fitting import settings_of
from dispfx.api.folder_verification import verify
from dispfx.api.folders import load
from dispfx.api.opening import learn_settings
from dispfx.api.plan_learning import follow_command
from dispfx.api.preview import preview
from dispfx.api.printing import PASSES, printing
from dispfx.api.programs import analyse, apart, capture, gate, gated, learn, lower
from dispfx.api.tasks import score_tasks
from dispfx.measure.estimate import estimate
from dispfx.training.preparation import Compute

__all__ = [
    "PASSES",
    "CachedDecoder",
    "Compute",
    "agree",
    "analyse",
    "apart",
    "apply",
    "bench",
    "capture",
    "capture_cached",
    "compile",
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
    "score_tasks",
    "settings_of",
    "tune_settings",
    "verify",
]
