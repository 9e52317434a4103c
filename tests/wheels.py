"""Builds a wheel or sdist of the checkout without a network, leaving nothing in the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent


def copied_checkout(into: Path) -> Path:
    """Copy the checkout's files that a build reads."""
    copy = into / "checkout"
    copy.mkdir()
    for room in ("dispfx", "passes"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / room, copy / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", "README.md", "dispfx_autoload.py"):
        shutil.copy(CHECKOUT / name, copy / name)
    return copy


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a wheel or sdist of `source` without a network."""
    code = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(into)!r}))"
    into.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]
