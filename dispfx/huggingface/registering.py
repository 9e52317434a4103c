"""Register pruned folders with transformers at `import dispfx`, or as soon as transformers is imported.

`import dispfx` must be fast, and transformers may not be installed.  So the registering modules are imported
right after the module of transformers that they extend: the table of weight formats, which lm_eval reads
before it loads anything, and the base class of all models.

Programs whose code cannot be edited (lm_eval, accelerate) get the same from `DISPFX_AUTOLOAD=1`, see
`dispfx_autoload`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# What is imported after which module; importing it registers.
_FOLLOWERS = {
    "transformers.quantizers.auto": "dispfx.huggingface.quantizer",
    "transformers.modeling_utils": "dispfx.huggingface.guards",
}


def register() -> None:
    """Let transformers load pruned folders, now or when it is imported; once."""
    waiting = {finder.awaited for finder in sys.meta_path if isinstance(finder, _Waiting)}
    for awaited, follower in _FOLLOWERS.items():
        if awaited in sys.modules:
            importlib.import_module(follower)
        elif awaited not in waiting:
            sys.meta_path.insert(0, _Waiting(awaited, follower))


class _Waiting(MetaPathFinder):
    """Finds nothing; has an awaited module followed by another one."""

    def __init__(self, awaited: str, follower: str):
        self.awaited = awaited
        self._follower = follower

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_follow(module: ModuleType) -> None:
            execute(module)
            # Where the follower is being imported already, because it needs the awaited module itself, it
            # registers when it is done.
            importlib.import_module(self._follower)

        spec.loader.exec_module = then_follow  # type: ignore[method-assign]
        return spec
