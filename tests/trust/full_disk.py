"""Let every write of a run fail once, as on a full disk, and go on when there is room again.

    python -m tests.trust.full_disk

A process may write files of a given size at most; the sizes go from nothing to nearly the largest file.
Prints how many runs were stopped, and every fault, as JSON.
"""

import argparse
import json
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from tests.trust.runs import command, run, write_tokens

EXIT_INPUT = 2
SIZES = [0, 100, 1_000, 4_000, 12_000, 20_000, 40_000, 60_000, 80_000, 120_000]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the largest file")
    sizes = parser.parse_args().sizes
    with tempfile.TemporaryDirectory() as folder:
        record = fill(Path(folder), sizes)
    print(json.dumps(record, indent=1))
    return int(bool(record["faults"]))


def fill(folder: Path, sizes: list[int]) -> dict[str, object]:
    """Return how many runs were stopped by a limit, and faults in words."""
    tokens = write_tokens(folder / "tokens.safetensors")
    whole = folder / "whole"
    reference = run(command(tokens, whole))
    faults = [reference.said] if reference.code else []
    stopped = 0
    for size in sizes if not faults else []:
        out = folder / str(size) / "out"
        out.parent.mkdir()
        words = command(tokens, out)
        ended = run(words, before=partial(_no_larger_files_than, size))
        if ended.code == 0:
            continue
        stopped += 1
        faults += [f"{size} bytes: {fault}" for fault in _faults(ended.code, ended.said, out)]
        again = run([*words, "--resume"])
        if (
            again.code != 0
            or (out / "plan.safetensors").read_bytes() != (whole / "plan.safetensors").read_bytes()
        ):
            faults.append(f"{size} bytes: --resume ended with {again.code}: {again.said}")
    return {"runs": len(sizes), "stopped": stopped, "faults": faults}


def _no_larger_files_than(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


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
