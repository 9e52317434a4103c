"""`DISPFX_AUTOLOAD=1`: let programs whose code cannot be edited load pruned folders.

torch calls `autoload` whenever it is imported, by the entry point group `torch.backends`.  It is a module of
its own because importing anything of the package already registers with transformers, and that is to happen
where it is asked for only.
"""

import os


def autoload() -> None:
    """Do what `import dispfx` does, where the environment asks for it."""
    if os.environ.get("DISPFX_AUTOLOAD", "") not in ("", "0"):
        import dispfx  # noqa: F401 - registers
