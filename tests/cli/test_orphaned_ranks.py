"""No rank outlives its launcher by more than ten seconds, at any stage and however it was started.

Real processes: their launcher gets a signal while the ranks meet, learn or write.  A mark in the environment
finds each process of a run, also where it has a session of its own.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dispfx.distributed import launcher
from dispfx.learning.state import saved_step
from tests.processes import ROOT, wait_until
from tests.trust.runs import write_tokens

LONGEST_SECONDS = 10
MARK = "DISPFX_TEST_MARK"
WORDS = "compile tests.api.plain:build_decoder --ratio 0.3 --recipe paper --seq-len 16 --batch-size 2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs to see processes' marks"),
]


def alive(mark: str, variable: str = "RANK") -> set[int]:
    """Return the running processes with that mark that have a variable."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = (folder / "environ").read_bytes()
            is_zombie = (folder / "stat").read_text().rpartition(") ")[2].startswith("Z")
            if f"{MARK}={mark}".encode() in own and f"\0{variable}=".encode() in own and not is_zombie:
                found.add(int(folder.name))
    return found


@contextmanager
def started_with_mark(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a program whose processes are found by a mark, and end all of them when the block is left."""
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        yield process, mark
    finally:
        process.kill()
        for rank in alive(mark):
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        process.communicate()


def require_none_left(mark: str) -> None:
    """Require that no rank is left after ten seconds."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(mark), "ranks are left ten seconds after their launcher's death"


# One rank of two, whose other never comes: it waits at rendezvous until its time is up.
FOREIGN_LAUNCHER = """
import os, socket, subprocess, sys
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
variables = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
subprocess.run([sys.executable, "-m", "dispfx", *sys.argv[1:]], env=os.environ | variables)
"""


def listens(process: int) -> bool:
    """Whether a process listens at a port, as the rank does that others are to meet."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").glob("*"):
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    tables = [Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return any(row[3] == "0A" and f"socket:[{row[9]}]" in sockets for row in rows if len(row) > 9)


def test_a_rank_at_rendezvous_ends_with_a_launcher_that_is_not_ours(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens.safetensors")
    words = [*WORDS.split(), "--steps", "9", "--data", str(tokens), "--out", str(tmp_path / "out")]
    with started_with_mark(["-c", FOREIGN_LAUNCHER, *words]) as (run, mark):
        wait_until(lambda: any(map(listens, alive(mark))), run, seconds=120, what="a rank that listens")
        run.kill()
        require_none_left(mark)


def in_learning(out: Path) -> bool:
    state = out.with_name("out.state")
    return state.is_dir() and (saved_step(state) or 0) >= 2


def in_writing(out: Path) -> bool:
    return any(out.parent.glob("out.partial-*"))


STAGES: dict[str, tuple[Callable[[Path], bool], int, str]] = {
    "learning": (in_learning, signal.SIGKILL, "100000"),
    "writing": (in_writing, signal.SIGKILL, "4"),
    "learning, by a request to end": (in_learning, signal.SIGTERM, "100000"),
    "learning, by a closed terminal": (in_learning, signal.SIGHUP, "100000"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_end_with_their_launcher(tmp_path: Path, stage: str):
    reached, number, steps = STAGES[stage]
    out, tokens = tmp_path / "out", write_tokens(tmp_path / "tokens.safetensors")
    words = [*WORDS.split(), "--save-every", "2", "--launch", "2", "--steps", steps]
    with started_with_mark(["-m", "dispfx", *words, "--data", str(tokens), "--out", str(out)]) as (run, mark):
        wait_until(lambda: reached(out), run, seconds=300, what=stage)
        run.send_signal(number)
        require_none_left(mark)
        # A rank looks twice a second, and writing may be done by then: a folder is whole or absent.
        whole = stage == "writing" and (out / "report.json").is_file()
        if number == signal.SIGKILL and not whole:
            said, _ = run.communicate(timeout=LONGEST_SECONDS)
            assert "the process that started this run has ended" in said
    assert out.exists() == whole and not list(tmp_path.glob("out.partial-*")), (
        "a half-written folder was removed"
    )
    assert whole or saved_step(tmp_path / "out.state"), "the run can go on"


def test_a_process_that_is_no_rank_is_not_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launcher, "_watching", False)
    launcher.end_with_launcher()
    assert not launcher._watching
