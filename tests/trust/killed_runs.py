"""Kill runs at random moments, go on with --resume, and compare with a run that was never killed.

    python -m tests.trust.killed_runs --kills 50 --out record.json

A run learns, verifies and writes.  The phases of a run take turns to be killed in, at random moments that a
whole run has had (see `tests.trust.moments`), so every run is killed, however busy the machine is.  Those
that are killed while they export do export to ONNX.  Every third is killed a second time while it goes on.
Prints how many were killed, in which phase, and every difference.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.trust.moments import PHASES, Moment, Moments
from tests.trust.runs import KILLED, Ended, command, run, warm_up, write_tokens


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


@dataclass(frozen=True)
class Whole:
    """A run that was never killed.

    Args:
        out: its folder.
        counts: the moments it had, by phase.
    """

    out: Path
    counts: dict[str, int]


def kill_runs(folder: Path, kills: int, moments: random.Random) -> dict[str, object]:
    """Return what happened: runs, runs to be killed and killed, in which phase, and faults in words."""
    warm_up(folder)
    tokens = write_tokens(folder / "tokens.safetensors")
    wholes = {}
    for exports in (False, True):
        out = folder / f"whole-{exports}"
        counted = Moments(out)
        reference = run(command(tokens, out, *_export(exports)), before=counted.begin)
        if reference.code != 0:
            return {"runs": 0, "asked": 0, "kills": 0, "killed_in": {}, "faults": [reference.said]}
        wholes[exports] = Whole(out, counted.counts)
    asked, faults, killed_in = 0, [], Counter[str]()
    for index in range(kills):
        out = folder / str(index) / "out"
        out.parent.mkdir()
        phase = PHASES[index % len(PHASES)]
        whole = wholes[phase == "onnx"]
        words = command(tokens, out, *_export(phase == "onnx"))
        moment = phase, moments.randrange(whole.counts[phase])
        had: dict[str, int] = {}
        for again in range(2 if index % 3 == 2 else 1):
            if again:
                moment = _later(moments, whole.counts, had, out)
            watched = Moments(out, moment, moments.random())
            ended = run([*words, "--resume"] if again else words, before=watched.begin)
            had = watched.counts
            asked += 1
            killed_in[moment[0]] += ended.code == KILLED
            faults += [f"run {index} at {moment}: {fault}" for fault in _faults_of_a_kill(ended, out, whole)]
        faults += [f"run {index} at {moment}: {fault}" for fault in _faults_of_the_rest(words, out, whole)]
    return {
        "runs": kills,
        "asked": asked,
        "kills": sum(killed_in.values()),
        "killed_in": dict(sorted(killed_in.items())),
        "faults": faults,
    }


def _export(wanted: bool) -> tuple[str, str]:
    return "--export", "onnx" if wanted else "none"


def _later(moments: random.Random, whole: dict[str, int], had: dict[str, int], out: Path) -> Moment:
    """Return a moment that a run has which goes on where one was killed that had `had`."""
    state = out.with_name(f"{out.name}.state")
    if out.exists():
        return "tidying", 0
    left = whole["learning"] - had.get("learning", 0)
    if (state / "plan.safetensors").is_file() or left <= 0:
        return "folder", moments.randrange(whole["folder"])
    return "learning", moments.randrange(left)


def _faults_of_a_kill(ended: Ended, out: Path, whole: Whole) -> list[str]:
    faults = []
    if ended.code != KILLED:
        faults.append(f"ended with {ended.code} before it was killed: {ended.said}")
    if out.exists() and _files(out) != _files(whole.out):
        faults.append(f"left half a folder: {sorted(path.name for path in out.iterdir())}")
    return faults


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _faults_of_the_rest(words: list[str], out: Path, whole: Whole) -> list[str]:
    """Finish a run that was killed, and return what is wrong with its end."""
    ended = run([*words, "--resume"])
    if ended.code != 0:
        return [f"--resume ended with {ended.code}: {ended.said}"]
    faults = []
    if _files(out) != _files(whole.out):
        faults.append(f"other files than those of the run that was not killed: {_files(out)}")
    elif (out / "plan.safetensors").read_bytes() != (whole.out / "plan.safetensors").read_bytes():
        faults.append("another plan than that of the run that was not killed")
    left = sorted(path.name for path in out.parent.iterdir() if path != out)
    return [*faults, f"left beside the folder: {left}"] if left else faults


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
