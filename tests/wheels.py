"""Builds a wheel or sdist of the checkout without a network, leaving nothing in the checkout."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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


def declared(wheel: metadata.Distribution) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that pip would install with a wheel without extras, by name.

    Args:
        wheel: as it is installed; it is not among them.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [(one, "") for one in wheel.requires or ()]
    while waiting:
        text, extra = waiting.pop()
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        if name in found and not needed.extras:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # such as CUDA's libraries, where torch was built without
        waiting += [(one, each) for one in found[name].requires or () for each in (*needed.extras, "")]
    return found


def link_distributions(found: dict[str, metadata.Distribution], into: Path) -> None:
    """Make a folder of links to what distributions consist of; nothing else can be imported from it."""
    into.mkdir()
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", ".")}:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (into / top).exists() and top != "__pycache__":
                (into / top).symlink_to(target)
