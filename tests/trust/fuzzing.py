"""Read spoilt files and wrong words in great number; every one must be accepted or refused in words.

    python -m tests.trust.fuzzing --inputs 100000 --out record.json

Prints how many inputs of each kind were tried, accepted and refused, and every fault once, with the files of
one such case kept beside the record.  A fault is an exception other than the input's own, ten seconds without
an end, memory beyond two gigabytes, a file opened for writing or moved outside the case's folder, a process
started, a secret file read, or the end of the process.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.trust.confined import Watch, limit_memory, outcome
from tests.trust.hostile import Kind, kinds
from tests.trust.words import words_kind

# Hypothesis remembers what it has drawn; a round is as long as that costs little.
ROUND = 1_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    parser.add_argument("--keep", type=Path, help="folder for a case of every fault")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = fuzz(Path(folder), args.inputs, args.seed, args.kinds, args.keep)
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return int(bool(record["faults"]))


def fuzz(
    folder: Path, inputs: int, first_seed: int, only: list[str] | None, keep: Path | None
) -> dict[str, Any]:
    """Return what was tried and what went wrong."""
    made, work, canary = folder / "made", folder / "work", folder / "outside.safetensors"
    for path in (made, work, work / "tmp"):
        path.mkdir()
    canary.write_bytes(b"secret")
    chosen = [kind for kind in [*kinds(made), words_kind(made)] if only is None or kind.name in only]
    tempfile.tempdir = str(work / "tmp")
    watch = Watch(work, canary)
    # A case may be the first to import a module, and what is kept of that lies elsewhere.
    sys.dont_write_bytecode = True
    shares = sum(kind.share for kind in chosen)
    began, counts, faults = time.monotonic(), {}, {}
    limit_memory()
    for kind in chosen:
        trial = _Trial(kind, work / "case", watch, keep)
        trial.run(max(1, round(inputs * kind.share / shares)), first_seed)
        counts[kind.name] = dict(sorted(trial.counts.items()))
        faults.update({f"{kind.name}: {fault}": many for fault, many in trial.faults.items()})
        print(f"{kind.name}: {counts[kind.name]}", file=sys.stderr, flush=True)
    total = sum(sum(of.values()) for of in counts.values())
    return {"inputs": total, "seconds": round(time.monotonic() - began, 1), "kinds": counts, "faults": faults}


class _Trial:
    """Inputs of one kind, and what became of them."""

    def __init__(self, kind: Kind, case: Path, watch: Watch, keep: Path | None):
        self.kind, self.case, self.watch, self.keep = kind, case, watch, keep
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()

    def run(self, inputs: int, first_seed: int) -> None:
        """Draw and try so many inputs."""
        done, number = 0, first_seed * 1_000
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        for name, data in self.kind.whole.items():
            (self.case / name).write_bytes(data)
        self._require_valid()
        while done < inputs:
            self._round(min(ROUND, inputs - done), number)
            done = sum(self.counts.values())
            number += 1

    def _require_valid(self) -> None:
        """Count it as a fault where the files that nobody has spoilt are not accepted."""
        self._attempt(self.kind.valid)
        if self.counts.pop("accepted", 0) != 1:
            self.faults["the valid files are not accepted"] += 1
        self.counts.clear()

    def _round(self, inputs: int, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=inputs,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
                HealthCheck.large_base_example,
            ],
        )
        @given(self.kind.cases)
        def attempt(files: Any) -> None:
            self._attempt(files)

        attempt()

    def _attempt(self, files: Any) -> None:
        for name, data in files.items():
            (self.case / name).write_bytes(data)
        ended, fault = outcome(lambda: self.kind.read(self.case), self.watch)
        self.counts[ended] += 1
        if fault is not None:
            short = fault[:300]
            if short not in self.faults and self.keep is not None:
                kept = self.keep / f"{self.kind.name}-{len(self.faults)}"
                shutil.copytree(self.case, kept, dirs_exist_ok=True)
            self.faults[short] += 1
        for name in files:
            (self.case / name).unlink(missing_ok=True)
            if name in self.kind.whole:
                (self.case / name).write_bytes(self.kind.whole[name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
