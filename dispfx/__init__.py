"""dispfx: a compiler that makes decoder language models smaller (DISP-LLM, arXiv 2410.11988).

    program = dispfx.capture(model)                    # what can be pruned
    plan = dispfx.learn(program, tokens, ratio=0.3)    # what will be
    smaller = dispfx.lower(program, plan)              # a module on sliced weights
    dispfx.compile("demo", 0.3, out="out/demo")        # all of it, verified, as a folder

    AutoModelForCausalLM.from_pretrained("out/demo")   # transformers loads the folder like any other

Nothing heavy is imported before it is used, so `import dispfx` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dispfx.errors import DispfxError
from dispfx.huggingface.registering import register
from dispfx.version import __version__ as __version__

if TYPE_CHECKING:
    from dispfx.api import capture, compile, gate, gated, learn, learn_family, load, lower, recover
    from dispfx.ir.program import Program
    from dispfx.plan.family import Family
    from dispfx.plan.plan import Plan

__all__ = [
    "DispfxError", "Family", "Plan", "Program", "capture", "compile", "gate", "gated", "learn",
    "learn_family", "load", "lower", "recover",
]  # fmt: skip

_HOMES = {
    "Family": "dispfx.plan.family",
    "Plan": "dispfx.plan.plan",
    "Program": "dispfx.ir.program",
    **dict.fromkeys(
        ("capture", "compile", "gate", "gated", "learn", "learn_family", "load", "lower", "recover"),
        "dispfx.api",
    ),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dispfx' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
