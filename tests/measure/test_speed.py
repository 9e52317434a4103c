"""Timing: calls take turns, and every call runs before it is timed."""

import gc
import time
import weakref
from functools import partial
from unittest.mock import MagicMock

import torch

from dispfx.benchmark.timing import compare_times, device_name, peak_bytes, recorded
from dispfx.kernels import recording

CPU = torch.device("cpu")


def test_calls_take_turns_after_a_first_run():
    order: list[str] = []
    compare_times([lambda: order.append("a"), lambda: order.append("b")], CPU, rounds=2, round_seconds=0.0)
    assert order == ["a", "a", "b", "b", "a", "b", "a", "b"]


def test_a_longer_call_takes_longer():
    short, long = compare_times(
        [lambda: time.sleep(0.001), lambda: time.sleep(0.02)], CPU, rounds=3, round_seconds=0.0
    )
    assert short.least_seconds <= short.median_seconds
    assert long.median_seconds >= 0.02 > short.least_seconds >= 0.001


def test_what_was_recorded_keeps_the_tensors_that_it_reads(monkeypatch):
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(recording, "_capture_stream", MagicMock())
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    replay = recorded(partial(torch.Tensor.add_, tensor, 1), torch.device("cuda"))
    del tensor
    gc.collect()
    assert alive() is not None, "a graph replays on the memory of its tensors, and must not lose it"
    replay()
    del replay
    gc.collect()
    assert alive() is None


def test_a_cpu_records_nothing_and_counts_no_memory():
    calls: list[int] = []
    call = recorded(lambda: calls.append(1), CPU)
    call()
    assert peak_bytes(call, CPU) is None
    assert len(calls) == 2
    assert "thread" in device_name(CPU)
