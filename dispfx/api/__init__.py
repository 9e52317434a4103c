"""Everything dispfx does, as functions: the command line and `import dispfx` are thin over this."""

from dispfx.api.commands import evaluate, export, generate, inspect, learn_plan, verify
from dispfx.api.compilation import apply, compile
from dispfx.api.folders import load
from dispfx.api.opening import learn_settings
from dispfx.api.programs import PASSES, analyse, capture, gate, gated, learn, lower

__all__ = [
    "PASSES", "analyse", "apply", "capture", "compile", "evaluate", "export", "gate", "gated", "generate",
    "inspect", "learn", "learn_plan", "learn_settings", "load", "lower", "verify",
]  # fmt: skip
