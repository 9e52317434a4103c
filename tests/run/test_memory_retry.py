"""Memory that runs out in the first step of learning: once more with checkpoints, and no other masks."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dispfx.errors import memory_shortage
from dispfx.fast_decoder.preparation import PreparedLoss
from dispfx.learning.trainer import Watch
from dispfx.plan.plan import Plan
from dispfx.run.mask_learning import learn
from dispfx.settings import ComputeSettings
from tests.captures import plain

ROOT = Path(__file__).resolve().parents[2]
TOLD = "memory ran out in the first step: trying once more with --checkpointing on"


def learned(notes: list[str], compute: ComputeSettings | None = None) -> Plan:
    program = plain("llama")
    torch.manual_seed(0)
    ids = torch.randint(program.vocabulary_size or 50, (600,))
    watch = Watch(note=notes.append)
    sizes = {"batch_size": 2, "seq_len": 16, "samples": 2}
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
def test_what_a_user_chose_is_not_changed(short: Callable[..., list[int]], chosen: str):
    calls, notes = short(always=True), list[str]()
    with pytest.raises(torch.OutOfMemoryError):
        learned(notes, ComputeSettings(checkpointing=chosen))  # type: ignore[arg-type]
    assert TOLD not in notes and len(calls) == 1


def test_a_later_step_is_not_tried_again(short: Callable[..., list[int]]):
    calls, notes = short(at=10**9), list[str]()
    learned(notes)
    notes.clear()
    short(at=len(calls))  # the last call is of the last step
    with pytest.raises(torch.OutOfMemoryError) as error:
        learned(notes)
    assert TOLD not in notes and memory_shortage(error.value) is not None


LIMITED = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from dispfx.api import capture, learn
from dispfx.learning.trainer import Watch
from dispfx.run.opening import open_model
from dispfx.settings import ModelSettings
program = capture(open_model(ModelSettings("demo")).model)
ids = torch.randint(program.vocabulary_size, (40_000,), generator=torch.Generator().manual_seed(0))
size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
room = int(sys.argv[1]) * 10**6
if room:
    limit = int(size.split()[1]) * 1024 + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
notes = []
sizes = dict(batch_size=64, seq_len=128, samples=1, steps=1, start="uniform", hypernetwork="none")
plan = learn(program, ids, 0.3, watch=Watch(note=notes.append), **sizes)
print(json.dumps([notes, {one.site: one.kept.tolist() for one in plan.selections}]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited, and read in /proc")
def test_a_process_with_too_little_memory_learns_the_same_with_checkpoints():
    """Whole, 64 × 128 tokens of the demo take about 650 MB; with checkpoints a third of that."""

    def run(room: int) -> tuple[list[str], dict[str, list[int]]]:
        words = [sys.executable, "-W", "ignore", "-c", LIMITED, str(room)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    (noted, expected), (notes, found) = run(0), run(400)
    assert TOLD in notes and TOLD not in noted
    assert found == expected
