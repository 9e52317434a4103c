"""--launch starts this very command several times, and says which process ended a run."""

from types import SimpleNamespace

import pytest

from dispfx.cli import launching
from dispfx.errors import DispfxError


def failure(exitcode: int, signal: str, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, pid=77, signal_name=lambda: signal)


@pytest.mark.parametrize(
    "given",
    [["learn", "demo", "--launch", "2", "--steps", "3"], ["learn", "--launch=2", "demo", "--steps", "3"]],
)
def test_the_processes_are_not_told_to_launch_again(given):
    assert launching._without_launch(given) == ["learn", "demo", "--steps", "3"]


def test_more_processes_than_a_host_can_hold_are_refused_before_one_starts(monkeypatch):
    monkeypatch.setattr(launching, "_run", lambda count, arguments: pytest.fail("it must not start"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.raises(DispfxError, match="at most 16 processes for each of this host's 2"):
        launching.launches(33)
    started = []
    monkeypatch.setattr(launching, "_run", lambda count, arguments: started.append(count))
    assert launching.launches(32) and started == [32]


def test_one_of_the_processes_launches_nothing(monkeypatch):
    monkeypatch.setattr(launching, "_run", lambda count, arguments: pytest.fail("it must not start"))
    assert not launching.launches(None)
    monkeypatch.setenv("RANK", "1")
    assert not launching.launches(2)


def test_a_killed_process_is_named_and_not_those_that_ended_for_its_sake():
    failures = {0: failure(-15, "SIGTERM", 1), 1: failure(2, "", 2), 2: failure(-9, "SIGKILL", 3)}
    with pytest.raises(DispfxError, match=r"rank 2 \(process 77\) was killed by SIGKILL"):
        launching._raise(failures)


def test_a_process_that_was_ended_because_another_refused_is_not_named():
    with pytest.raises(SystemExit) as caught:
        launching._raise({0: failure(-15, "SIGTERM", 1), 1: failure(2, "", 4)})
    assert caught.value.code == 2


@pytest.mark.parametrize(("count", "size"), [(None, None), (1, None), (None, "1")])
def test_parts_of_the_weights_need_several_processes(monkeypatch, count, size):
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    launching.check_shard(False, count)
    with pytest.raises(DispfxError, match="there is only one"):
        launching.check_shard(True, count)


def test_parts_of_the_weights_are_for_processes_to_be_started_or_of_torchrun(monkeypatch):
    launching.check_shard(True, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    launching.check_shard(True, None)


def test_a_process_that_said_what_is_wrong_passes_its_exit_code_on():
    with pytest.raises(SystemExit) as caught:
        launching._raise({0: failure(1, "", 5), 1: failure(2, "", 4)})
    assert caught.value.code == 2
