"""What a process holds for its tensors, by device and allocator."""

import pytest
import torch

from dispfx.estimate import resident
from dispfx.estimate.resident import BEGUN_BYTES, PROCESS_BYTES, RESERVED, RETAINED, resident_bytes

CPU = torch.device("cpu")


def test_what_has_no_allocator_of_its_own_holds_the_tensors_alone():
    assert resident_bytes(900.0, 100.0, torch.device("meta")) == 1000


def test_a_gpu_reserves_more_for_a_step_than_its_blocks():
    assert resident_bytes(7, 10**9, torch.device("cuda")) == int(7 + RESERVED * 10**9) + BEGUN_BYTES


def test_glibc_keeps_more_of_a_step_than_its_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resident, "keeps_freed_blocks", lambda: True)
    assert resident_bytes(7, 10**9, CPU) == int(7 + RETAINED * 10**9) + PROCESS_BYTES


def test_another_allocator_holds_the_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resident, "keeps_freed_blocks", lambda: False)
    assert resident_bytes(7, 10**9, CPU) == 7 + 10**9 + PROCESS_BYTES
