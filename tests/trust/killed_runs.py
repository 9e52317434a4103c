"""Kill runs at random moments, go on with --resume, and compare with a run that was never killed.

    python -m tests.trust.killed_runs --kills 50 --out record.json

A run learns, verifies and writes; every fourth exports to ONNX too.  Every third is killed a second time
while it goes on.  Prints how many were killed, in which stage of the run, and every difference.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.trust.runs import KILLED, command, run, write_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = kill_runs(Path(folder), args.kills, random.Random(args.seed))
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return int(bool(record["faults"]))


def kill_runs(folder: Path, kills: int, moments: random.Random) -> dict[str, object]:
    """Return what happened: runs, kills, the state they were killed in, and faults in words."""
    tokens = write_tokens(folder / "tokens.safetensors")
    references = {}
    for exports in (False, True):
        whole = folder / f"whole-{exports}"
        reference = run(command(tokens, whole, "--export", "onnx" if exports else "none"))
        if reference.code != 0:
            return {"runs": 0, "kills": 0, "killed_while": {}, "faults": [reference.said]}
        references[exports] = whole, reference.seconds
    done, faults, stages = 0, [], Counter[str]()
    for index in range(kills):
        out = folder / str(index) / "out"
        out.parent.mkdir()
        exports = index % 4 == 0
        words = command(tokens, out, "--export", "onnx" if exports else "none")
        whole, seconds = references[exports]
        for again in range(2 if index % 3 == 2 else 1):
            ended = run([*words, "--resume"] if again else words, kill_after=moments.uniform(0, seconds))
            if ended.code == KILLED:
                done += 1
                stages[_stage(out)] += 1
            elif ended.code != 0:
                faults.append(f"run {index} ended with {ended.code} before it was killed: {ended.said}")
            if out.exists() and _files(out) != _files(whole):
                faults.append(
                    f"run {index} left half a folder: {sorted(path.name for path in out.iterdir())}"
                )
        faults += [f"run {index}: {fault}" for fault in _faults_of_the_rest(words, out, whole)]
    return {"runs": kills, "kills": done, "killed_while": dict(sorted(stages.items())), "faults": faults}


def _stage(out: Path) -> str:
    """Say how far a killed run had come, from what it left."""
    state = out.with_name(f"{out.name}.state")
    if out.exists():
        return "complete"
    if not state.is_dir():
        return "before the first state"
    if (state / "plan.safetensors").is_file():
        return "with a plan: lowering, verifying, writing, exporting"
    return "learning"


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _faults_of_the_rest(words: list[str], out: Path, whole: Path) -> list[str]:
    """Finish a run that was killed, and return what is wrong with its end."""
    ended = run([*words, "--resume"])
    if ended.code != 0:
        return [f"--resume ended with {ended.code}: {ended.said}"]
    faults = []
    if _files(out) != _files(whole):
        faults.append(f"other files than those of the run that was not killed: {_files(out)}")
    elif (out / "plan.safetensors").read_bytes() != (whole / "plan.safetensors").read_bytes():
        faults.append("another plan than that of the run that was not killed")
    left = sorted(path.name for path in out.parent.iterdir() if path != out)
    return [*faults, f"left beside the folder: {left}"] if left else faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
