"""The record of a step, for the screen and as a line of metrics.jsonl."""

import json
import math
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from dispfx.errors import DataError
from dispfx.files.disk import replacing, writing
from dispfx.files.json_text import parse_json
from dispfx.learning.tensorboard import TensorBoardLog

METRICS_FILE = "metrics.jsonl"
# Enough to hide a step that saves or measures the held-out loss.
_PACE_STEPS = 100
# They compile, and fill caches.
_SLOW_STEPS = 2


@dataclass(frozen=True)
class StepRecord:
    """One step of learning.

    Args:
        step: steps done, this one included.
        steps: steps of the whole run.
        loss: of the objective, with sampled masks, in nats; not finite after a bad step.
        budget_loss: R, before it is weighted by λ.
        achieved_ratio: share of the counted parameters that the sampled masks remove.
        tokens_per_second: over the last steps.
        seconds_left: at that pace.
        bad_steps: steps so far whose loss or gradient was not finite.
        held_out_loss: with hardened masks on held-out text, where it was measured.
    """

    step: int
    steps: int
    loss: float
    budget_loss: float
    achieved_ratio: float
    tokens_per_second: float
    seconds_left: float
    bad_steps: int = 0
    held_out_loss: float | None = None


class Pace:
    """Measures speed over the last steps, ignoring the slow first ones once others exist."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._ends = deque([perf_counter()], maxlen=_PACE_STEPS + 1)
        self._slow_left = _SLOW_STEPS

    def tick(self, steps_left: int) -> tuple[float, float]:
        """Record the end of a step; return tokens per second and seconds left."""
        self._ends.append(perf_counter())
        if len(self._ends) == _SLOW_STEPS + 2:
            while self._slow_left:
                self._ends.popleft()
                self._slow_left -= 1
        seconds = max((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1), 1e-9)
        return self._tokens_per_step / seconds, steps_left * seconds


class MetricsLog:
    """Appends records to metrics.jsonl, one JSON object per line, and to TensorBoard.

    Lines after `first_step` are removed, because a resumed run repeats their steps.  Without a folder nothing
    is written.

    Raises:
        DataError: if the earlier lines are not text.
        OutputError: if the disk is full, here or when a line is written.
    """

    def __init__(self, folder: Path | None, first_step: int):
        self._file: TextIO | None = None
        self._board: TensorBoardLog | None = None
        if folder is not None:
            self._path = folder / METRICS_FILE
            kept = _keep_until(self._path, first_step)
            with writing(self._path):
                self._file = self._path.open("a", encoding="utf-8")
            self._board = TensorBoardLog(folder, kept)

    def append(self, record: StepRecord) -> None:
        """Write one line; a number that is not finite becomes null."""
        if self._file is None:
            return
        values = asdict(record)
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()
        if self._board is not None:
            self._board.append(finite)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            with writing(self._path):
                self._file.close()


def _keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the lines of later steps and return the remaining records.

    Raises:
        DataError: if the file is not text.
    """
    if not path.exists():
        return []
    kept = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the record of the steps so far is damaged: {error}",
            where=str(path),
            hint="remove that file to go on without it",
        ) from error
    for line in lines:
        try:
            record = parse_json(line)
            if record["step"] <= step:
                kept.append(record)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a killed run can be cut off
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    return kept
