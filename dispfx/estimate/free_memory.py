"""How much memory a device can still give."""

import os
from pathlib import Path

import torch

_KILO = 1024
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device can still give to this process, or None where it does not say.

    On a CPU what the system has cached of files counts as free, and the limit of a container is kept to.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu":
        return None
    known = [size for size in (_available(), _left_in_group()) if size is not None]
    return min(known, default=None)


def _available() -> int | None:
    """Return what Linux says is available, or the pages that no one uses."""
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * _KILO
    except (OSError, ValueError, IndexError):
        pass
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_group() -> int | None:
    """Return what a container's limit leaves, cached files taken for free; None without a limit."""
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_GROUP / "memory.current").read_text(encoding="ascii"))
        lines = (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        if limit == "max":
            return None
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        return max(0, int(limit) - used + cached)
    except (OSError, ValueError, IndexError):
        return None
