"""Let every write of a run fail once, as on a full disk, and go on when there is room again.

    python -m tests.trust.full_disk --sizes 0 100 1000 4000 12000 20000 40000 60000 80000 120000
    python -m tests.trust.full_disk --file-systems 1 20000     in memory; needs leave to mount them

A process may write files of a given size at most, or all of its files together may take no more; the sizes go
from nothing to nearly the largest file, or to nearly all of them.  Going on, there is room.  Prints how many
runs were stopped, and every fault, as JSON.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from tests.trust.runs import command, run, warm_up, write_tokens

EXIT_INPUT = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="bytes of the largest file")
    parser.add_argument("--file-systems", type=int, nargs="*", default=[], help="bytes of a file system")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = fill(Path(folder), {FileLimit: args.sizes, FileSystem: args.file_systems})
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return int(bool(record["faults"]))


class FileLimit:
    """No file may be larger than that."""

    def __init__(self, folder: Path, size: int):
        self.before = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))

    def grow(self) -> None:
        """Do nothing: the limit is that of the process that has ended."""

    def remove(self) -> None:
        """Do nothing: the folder is an ordinary one."""


class FileSystem:
    """A folder that holds so much and no more; sizes are rounded up to pages of 4096 bytes.

    Raises:
        CalledProcessError: if this process may not mount a file system.
    """

    before = staticmethod(lambda: None)

    def __init__(self, folder: Path, size: int):
        self.folder = folder
        _call("mount", "-t", "tmpfs", "-o", f"size={max(size, 1)}", "tmpfs", str(folder))

    def grow(self) -> None:
        """Make room for everything."""
        _call("mount", "-o", "remount,size=64m", str(self.folder))

    def remove(self) -> None:
        """Leave an empty folder."""
        _call("umount", str(self.folder))


Place = type[FileLimit] | type[FileSystem]


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def fill(folder: Path, sizes: Mapping[Place, Sequence[int]]) -> dict[str, object]:
    """Return how many runs there were, how many were stopped by a limit, and faults in words."""
    warm_up(folder)
    tokens = write_tokens(folder / "tokens.safetensors")
    whole = folder / "whole"
    reference = run(command(tokens, whole))
    faults = [reference.said] if reference.code else []
    stopped = 0
    cases = [(place, size) for place, of_place in sizes.items() for size in of_place]
    for index, (place, size) in enumerate(cases if not faults else []):
        out = folder / str(index) / "out"
        out.parent.mkdir()
        disk = place(out.parent, size)
        words = command(tokens, out)
        ended = run(words, before=disk.before)
        if ended.code != 0:
            stopped += 1
            faults += [f"{size} bytes: {fault}" for fault in _faults(ended.code, ended.said, out)]
            disk.grow()
            again = run([*words, "--resume"])
            if again.code != 0 or _plan(out) != _plan(whole):
                faults.append(f"{size} bytes: --resume ended with {again.code}: {again.said}")
        disk.remove()
    return {"runs": len(cases), "stopped": stopped, "faults": faults}


def _plan(folder: Path) -> bytes:
    return (folder / "plan.safetensors").read_bytes()


def _faults(code: int, said: str, out: Path) -> list[str]:
    faults = []
    if code != EXIT_INPUT:
        faults.append(f"ended with {code}: {said}")
    if "Traceback" in said or "error:" not in said:
        faults.append(f"said {said!r}")
    left = sorted(path.name for path in out.parent.iterdir() if path.name != "out.state")
    if left:
        faults.append(f"left {left}")
    return faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
