"""Start the processes of one run on this host, and report which one failed.

`--launch N` starts this command N times, as torchrun does.  torch.distributed monitors the processes, and
stops all of them within seconds if one fails.  The processes also end with the launcher
(`dispfx.distributed.launcher`).
"""

import logging
import os
import sys
import uuid
from typing import Any

from dispfx.distributed.launcher import LAUNCHER
from dispfx.errors import DispfxError

_NAME = "--launch"
# Every process imports torch (about 0.4 GB); more processes would overload the host.
_MOST_A_CORE = 16


def launches(count: int | None) -> bool:
    """Run this command in `count` processes; return False if this process is one of them.

    Raises:
        DispfxError: if there would be too many processes, or one was killed, with its rank.
        SystemExit: with the exit code of a process that reported its own error.
        KeyboardInterrupt: if the run was interrupted.
    """
    if count is None or "RANK" in os.environ:
        return False
    _check_count(count)
    _run(count, _without_launch(sys.argv[1:]))
    return True


def check_shard(shard: bool, count: int | None) -> None:
    """Raise if the weights are sharded and there is only one process.

    Raises:
        DispfxError: if this is the only process.
    """
    size = int(os.environ.get("WORLD_SIZE", count or 1))
    if shard and size < 2:
        raise DispfxError(
            "--shard splits the weights among processes, but there is only one",
            hint="use --launch N with N of at least 2, or torchrun",
        )


def _check_count(count: int) -> None:
    cores = os.cpu_count() or 1
    if count > _MOST_A_CORE * cores:
        raise DispfxError(
            f"--launch starts at most {_MOST_A_CORE} processes for each of this host's {cores} core(s), "
            f"and {count:,} were asked for",
            hint="one process for each GPU, or for each core, is usual",
        )


def _without_launch(arguments: list[str]) -> list[str]:
    kept = []
    given = iter(arguments)
    for argument in given:
        if argument == _NAME:
            next(given, None)
        elif not argument.startswith(f"{_NAME}="):
            kept.append(argument)
    return kept


def _run(count: int, arguments: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "dispfx", *arguments)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as error:
        _raise(error.failures)


def _raise(failures: dict[int, Any]) -> None:
    """Report what ended the run: a killed process prints nothing itself."""
    killed = {rank: found for rank, found in failures.items() if found.exitcode < 0}
    ended_for_another = all(found.signal_name() == "SIGTERM" for found in killed.values())
    if ended_for_another and len(killed) < len(failures):
        failures = {rank: found for rank, found in failures.items() if rank not in killed}
        killed = {}
    if not killed:
        first = min(failures.values(), key=lambda found: found.timestamp)
        raise SystemExit(first.exitcode)
    # Processes that were stopped because another one failed come last.
    rank = min(
        killed, key=lambda number: (killed[number].signal_name() == "SIGTERM", killed[number].timestamp)
    )
    found = killed[rank]
    raise DispfxError(
        f"rank {rank} (process {found.pid}) was killed by {found.signal_name()}, which ended the run",
        hint="run the same command with --resume to go on from the last saved state",
    )
