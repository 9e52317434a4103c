"""What this installation has and lacks, and what each missing package is needed for."""

import platform
import re
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
from packaging.requirements import Requirement

from dispfx.version import __version__

_LEAST_PYTHON = (3, 11)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_DEVELOPMENT = "dev"


@dataclass(frozen=True)
class Finding:
    """One check.

    Args:
        name: of a package, a device or a program.
        state: found, required and missing, or optional and missing.
        detail: the version or size, or what to do.
    """

    name: str
    state: Literal["ok", "missing", "optional"]
    detail: str


def doctor() -> list[Finding]:
    """Check Python, the packages that dispfx requires, devices, and disk space; nothing is changed."""
    return [*_python(), *_packages(), *_devices(), _space()]


def package_finding(requirement: Requirement, extra: str | None) -> Finding:
    """Compare one installed package with the required version."""
    needed = "missing" if extra is None else "optional"
    asks = f"{requirement.name}{requirement.specifier}"
    remedy = f"pip install '{asks}'" if extra is None else f"pip install 'dispfx[{extra}]'"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(requirement.name, needed, f"not installed: {remedy}")
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "ok", version)
    return Finding(
        requirement.name, needed, f"{version} is installed, {requirement.specifier} is required: {remedy}"
    )


def _python() -> list[Finding]:
    fits = sys.version_info >= _LEAST_PYTHON
    asked = ".".join(map(str, _LEAST_PYTHON))
    detail = platform.python_version() + ("" if fits else f"; {asked} or newer is needed")
    return [
        Finding("dispfx", "ok", __version__),
        Finding("Python", "ok" if fits else "missing", detail),
    ]


def _packages() -> list[Finding]:
    try:
        lines = metadata.requires("dispfx") or []
    except metadata.PackageNotFoundError:
        return [
            Finding("dispfx's own list of packages", "optional", "not installed by pip; run from a checkout")
        ]
    findings = {}
    for requirement in map(Requirement, lines):
        extra = _EXTRA.search(str(requirement.marker or ""))
        name = extra.group(1) if extra else None
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": name or ""})
        if applies and name != _DEVELOPMENT:
            findings[requirement.name] = package_finding(requirement, name)
    return list(findings.values())


def _devices() -> list[Finding]:
    threads = torch.get_num_threads()
    found = [Finding("cpu", "ok", f"{platform.machine()}, {threads} thread{'s' if threads != 1 else ''}")]
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        return [*found, Finding("cuda", "optional", f"{built}; everything runs on the CPU")]
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        found.append(Finding(f"cuda:{number}", "ok", f"{card.name}, {card.total_memory / 1e9:,.0f} GB"))
    return found


def _space() -> Finding:
    return Finding("disk", "ok", f"{shutil.disk_usage('.').free / 1e9:,.0f} GB free here")
