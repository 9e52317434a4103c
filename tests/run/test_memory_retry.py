"""Memory that runs out in the first step of learning: once more with checkpoints, and no other masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfx.errors import memory_shortage
from dispfx.fast_decoder.preparation import PreparedLoss
from dispfx.learning.trainer import Watch
from dispfx.plan.plan import Plan
from dispfx.run.mask_learning import learn
from dispfx.settings import ComputeSettings
from dispfx.settings.sections import Switch
from tests.captures import plain
from tests.measure.live_memory import LiveMemory

TOLD = "memory ran out in the first step: trying once more with checkpoints"


def learned(notes: list[str], compute: ComputeSettings | None = None) -> Plan:
    program = plain("llama")
    torch.manual_seed(0)
    ids = torch.randint(program.vocabulary_size or 50, (600,))
    watch = Watch(note=notes.append)
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "samples": 2}
    return learn(program, ids, 0.3, compute=compute, watch=watch, steps=4, lr=0.05, **sizes)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let memory run out in a call of the loss, counted from 1, without checkpoints or always."""

    def run_out(*, at: int = 1, always: bool = False) -> list[int]:
        calls: list[int] = []
        loss = PreparedLoss.loss

        def limited(self: PreparedLoss, ids_BT: Tensor, masks: Tensor) -> Tensor:
            calls.append(len(calls) + 1)
            if calls[-1] >= at and (always or not getattr(self.decoder, "checkpointing", False)):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
            return loss(self, ids_BT, masks)

        monkeypatch.setattr(PreparedLoss, "loss", limited)
        return calls

    return run_out


def test_the_first_step_is_tried_once_more_with_checkpoints_and_gives_the_same_masks(
    short: Callable[..., list[int]],
):
    before: list[str] = []
    expected = learned(before)
    assert TOLD not in before
    short()
    notes: list[str] = []
    found = learned(notes)
    assert notes.count(TOLD) == 1
    for one, other in zip(expected.selections, found.selections, strict=True):
        assert torch.equal(one.kept, other.kept), one.site


def test_a_second_shortage_is_the_error(short: Callable[..., list[int]]):
    calls, notes = short(always=True), list[str]()
    with pytest.raises(torch.OutOfMemoryError):
        learned(notes)
    assert notes.count(TOLD) == 1 and len(calls) == 2


@pytest.mark.parametrize("chosen", ["on", "off"])
def test_what_a_user_chose_is_not_changed(short: Callable[..., list[int]], chosen: Switch):
    calls, notes = short(always=True), list[str]()
    with pytest.raises(torch.OutOfMemoryError):
        learned(notes, ComputeSettings(checkpointing=chosen))
    assert TOLD not in notes and len(calls) == 1


def test_a_later_step_is_not_tried_again(short: Callable[..., list[int]]):
    calls, notes = short(at=10**9), list[str]()
    learned(notes)
    notes.clear()
    short(at=len(calls))  # the last call is of the last step
    with pytest.raises(torch.OutOfMemoryError) as error:
        learned(notes)
    assert TOLD not in notes and memory_shortage(error.value) is not None


class LimitedMemory(LiveMemory):
    """Lets memory run out where all tensors together take more than a limit."""

    limit = 10**12

    def _count(self, storage: torch.UntypedStorage) -> None:
        super()._count(storage)
        if self.now > self.limit:
            raise torch.OutOfMemoryError(f"out of memory: {self.now} of {self.limit} bytes")


def test_what_the_first_try_held_is_free_for_the_second():
    program = plain("llama")
    text = torch.randint(50, (4_000,), generator=torch.Generator().manual_seed(0))

    def run(limit: int, checkpointing: Switch) -> tuple[int, list[str], Plan]:
        notes: list[str] = []
        sizes: dict[str, Any] = {"batch_size": 8, "seq_len": 64, "samples": 1, "steps": 1}
        with LimitedMemory(dict(program.tensors()).values()) as memory:
            memory.limit = limit
            compute, watch = ComputeSettings("off", checkpointing), Watch(note=notes.append)
            settings: dict[str, Any] = {"start": "uniform", "hypernetwork": "none", **sizes}
            plan = learn(program, text, 0.3, compute=compute, watch=watch, **settings)
        return memory.peak, notes, plan

    whole, _, expected = run(10**12, "off")
    least, _, _ = run(10**12, "on")
    assert least < 0.8 * whole
    _, notes, found = run((whole + least) // 2, "auto")
    assert TOLD in notes
    assert all(
        torch.equal(a.kept, b.kept) for a, b in zip(expected.selections, found.selections, strict=True)
    )
