"""The library that hands out memory is found by what it provides, and not by how it came into the process."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dispfx.estimate import allocator
from dispfx.estimate.allocator import keeps_freed_blocks, provider

GLIBC = platform.libc_ver()[0] == "glibc"
NEEDS_GLIBC = pytest.mark.skipif(not GLIBC, reason="libraries are preloaded, and settings read, by glibc")
LOOK = "from dispfx.estimate.allocator import *; print(provider()); print(keeps_freed_blocks())"
# As jemalloc and others do: the functions of the C library, by another library.
STAND_IN = """
extern void *memalign(unsigned long, unsigned long);
int posix_memalign(void **place, unsigned long alignment, unsigned long size) {
    *place = memalign(alignment, size);
    return *place ? 0 : 12;
}
"""


def looked(**environment: str) -> list[str]:
    """Return who provides memory, and whether freed blocks are kept, in a process with these settings."""
    unset = ("LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    plain = {name: value for name, value in os.environ.items() if name not in unset}
    plain["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error", "-c", LOOK]
    run = subprocess.run(command, env=plain | environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@NEEDS_GLIBC
def test_glibc_as_it_is_keeps_freed_blocks():
    file, keeps = looked()
    assert Path(file).name.startswith("libc") and keeps == "True"


@NEEDS_GLIBC
@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for an allocator is compiled")
def test_an_allocator_in_its_place_is_told_by_what_it_provides(tmp_path: Path):
    (tmp_path / "other.c").write_text(STAND_IN)
    library = tmp_path / "libother.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True)
    assert looked(LD_PRELOAD=str(library)) == [str(library), "False"]


@NEEDS_GLIBC
def test_a_preloaded_library_that_is_no_allocator_changes_nothing():
    """libgomp is often preloaded, and was taken for an allocator; it comes with torch."""
    (gomp, *_) = sorted(
        (Path(torch.__file__).parent / "lib").glob("*"), key=lambda file: "gomp" not in file.name
    )
    file, keeps = looked(LD_PRELOAD=str(gomp))
    assert Path(file).name.startswith("libc") and keeps == "True", gomp


@NEEDS_GLIBC
@pytest.mark.parametrize(
    ("name", "value", "keeps"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "131072", "False"),
        ("MALLOC_MMAP_THRESHOLD_", "0x10000", "False"),
        ("MALLOC_MMAP_THRESHOLD_", "33554432", "True"),  # blocks of a step lie below it
        ("MALLOC_MMAP_THRESHOLD_", "", "True"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536:glibc.malloc.check=0", "False"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536", "True"),
    ],
)
def test_blocks_that_are_mapped_one_by_one_are_given_back(name: str, value: str, keeps: str):
    assert looked(**{name: value})[1] == keeps


def test_other_systems_have_other_allocators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    assert not keeps_freed_blocks()


def test_where_the_system_does_not_say_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch):
    def fails(name: None) -> None:
        raise OSError("no such function")

    monkeypatch.setattr(allocator.ctypes, "CDLL", fails)
    assert provider() is None and not keeps_freed_blocks()
