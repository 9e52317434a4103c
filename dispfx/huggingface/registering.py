"""When transformers learns of pruned folders: at `import dispfx`, or as soon as transformers is imported.

`import dispfx` must cost nothing and transformers need not be there, so what registers is imported at the
moment that transformers' own `modeling_utils`, which every `from_pretrained` needs, has been imported.

Programs whose code cannot be edited (lm_eval, accelerate) get the same from `DISPFX_AUTOLOAD=1`: torch
calls `autoload` when it is imported, by the entry point group `torch.backends`.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTOLOAD = "DISPFX_AUTOLOAD"

_AWAITED = "transformers.modeling_utils"


def register() -> None:
    """Let transformers load pruned folders, now or when it is imported; once."""
    if _AWAITED in sys.modules:
        _install()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def autoload() -> None:
    """Called by torch; do what `import dispfx` does where the environment asks for it."""
    if os.environ.get(AUTOLOAD, "") not in ("", "0"):
        register()


class _Waiting(MetaPathFinder):
    """Finds nothing; has the awaited module followed by the registration."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_register(module: ModuleType) -> None:
            execute(module)
            _install()

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def _install() -> None:
    # Importing it registers.  Where it is being imported already, because it needs the awaited module
    # itself, it registers when it is done.
    importlib.import_module("dispfx.huggingface.quantizer")
