"""What a process holds for its tensors, by device and allocator."""

import platform

import pytest
import torch

from dispfx.measure import resident
from dispfx.measure.resident import PROCESS_BYTES, RETAINED, keeps_freed_blocks, resident_bytes

CPU = torch.device("cpu")


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))


def test_a_gpu_holds_the_tensors_alone():
    assert resident_bytes(900.0, 100.0, torch.device("meta")) == 1000


def test_glibc_keeps_more_of_a_step_than_its_tensors(glibc: None):
    assert resident_bytes(7, 10**9, CPU) == int(7 + RETAINED * 10**9) + PROCESS_BYTES


@pytest.mark.parametrize("name", ["LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_"])
def test_a_user_may_choose_another_allocator(glibc: None, monkeypatch: pytest.MonkeyPatch, name: str):
    assert keeps_freed_blocks()
    monkeypatch.setenv(name, "65536")
    assert not keeps_freed_blocks()
    assert resident_bytes(7, 10**9, CPU) == 7 + 10**9 + PROCESS_BYTES


def test_other_systems_have_other_allocators(glibc: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resident.platform, "libc_ver", lambda: ("", ""))
    assert not keeps_freed_blocks()
