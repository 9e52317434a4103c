"""A rank that is killed ends the run of several with its name, and the run goes on with --resume."""

import os
import re
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from dispfx.learning.state import saved_step
from tests.processes import started, wait_until
from tests.trust.runs import write_tokens

WORDS = (
    "learn tests.api.plain:build_decoder --ratio 0.3 --recipe paper --seq-len 16 --batch-size 2 "
    "--save-every 2 --launch 2 --shard"
)
LONGEST_SECONDS = 10


def start(out: Path, *words: str) -> AbstractContextManager[subprocess.Popen[str]]:
    given = ["--data", str(out.with_name("tokens.safetensors")), "--out", str(out)]
    return started(["dispfx", *WORDS.split(), *words, *given])


def process_of_rank(rank: int, launcher: int) -> int:
    """Return the process that the launcher started as that rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.findall(r"PPid:\t(\d+)", (folder / "status").read_text())[0])
            own = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in own:
            return int(folder.name)
    raise AssertionError(f"no process is rank {rank}")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs to see which process is which rank"
)
def test_a_killed_rank_ends_the_run_with_its_name_and_the_run_goes_on(tmp_path: Path):
    plan = tmp_path / "plan.safetensors"
    state = tmp_path / "plan.safetensors.state"
    write_tokens(tmp_path / "tokens.safetensors")
    with start(plan, "--steps", "100000") as run:
        wait_until(
            lambda: state.is_dir() and (saved_step(state) or 0) >= 2,
            run,
            seconds=300,
            what="a state after two steps",
        )
        killed = process_of_rank(1, run.pid)
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        _, said = run.communicate(timeout=LONGEST_SECONDS)
    assert time.monotonic() - began < LONGEST_SECONDS
    assert run.returncode == 2 and not plan.exists()
    assert f"rank 1 (process {killed}) was killed by SIGKILL" in said and "--resume" in said
    step = saved_step(state)
    assert step is not None
    with start(plan, "--steps", str(step + 2), "--resume") as again:
        said, wrong = again.communicate(timeout=300)
    assert again.returncode == 0, wrong
    assert f"going on at step {step}" in said and plan.exists()
