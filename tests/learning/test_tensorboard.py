"""TensorBoard shows what metrics.jsonl says: every step once, also after a killed run."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from dispfx.learning.records import METRICS_FILE, MetricsLog
from dispfx.learning.tensorboard import FOLDER, TensorBoardLog
from tests.learning.test_records import record

Points = Callable[[Path], dict[str, list[tuple[int, float]]]]


@pytest.fixture
def points() -> Points:
    """What TensorBoard reads in a state's folder, by tag; skips where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        found = module.EventAccumulator(str(folder / FOLDER), size_guidance={module.SCALARS: 0})
        found.Reload()
        return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


def test_every_figure_of_a_record_is_a_scalar(tmp_path: Path, points: Points):
    with MetricsLog(tmp_path, 0) as log:
        log.append(record(1, loss=2.5))
        log.append(record(2, loss=math.nan))
    found = points(tmp_path)
    assert found["learning/loss"] == [(1, 2.5)], "a loss that is not finite has no point"
    assert found["learning/tokens_per_second"] == [(1, 1000.0), (2, 1000.0)]
    written = json.loads((tmp_path / METRICS_FILE).read_text().splitlines()[0])
    numbers = {name for name, value in written.items() if value is not None} - {"step", "steps"}
    assert {tag.partition("/")[2] for tag in found} == numbers


def test_a_resumed_run_shows_every_step_once(tmp_path: Path, points: Points):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3, 4):
            log.append(record(step, loss=float(step)))
    with MetricsLog(tmp_path, 2) as log:
        for step in (3, 4, 5):
            log.append(record(step, loss=10.0 * step))
    assert points(tmp_path)["learning/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_what_a_killed_run_had_not_yet_written_is_there_after_resuming(tmp_path: Path, points: Points):
    killed = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        killed.append(record(step))
    with MetricsLog(tmp_path, 3) as log:
        log.append(record(4))
    assert [step for step, _ in points(tmp_path)["learning/loss"]] == [1, 2, 3, 4]
    killed.__exit__()


def test_a_fresh_run_in_the_same_folder_shows_nothing_of_the_one_before(tmp_path: Path, points: Points):
    for loss in (1.0, 2.0):
        with MetricsLog(tmp_path, 0) as log:
            log.append(record(1, loss=loss))
    assert points(tmp_path)["learning/loss"] == [(1, 2.0)]


def test_without_tensorboard_only_metrics_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("dispfx.learning.tensorboard.find_spec", lambda name: None)
    with MetricsLog(tmp_path, 0) as log:
        log.append(record(1))
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_tensorboard_that_does_not_load_is_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr("dispfx.learning.tensorboard.find_spec", lambda name: True)
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto.event_pb2", None)
    board = TensorBoardLog(tmp_path)
    board.append({"step": 1, "loss": 1.0})
    board.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_ends_the_view_and_not_the_run(tmp_path, points):
    board = TensorBoardLog(tmp_path)
    board.append({"step": 1, "loss": 1.0})
    assert board._file is not None
    board._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        board._file = full
        board._writer._writer = full
        board.append({"step": 2, "loss": 1.0})
        board.append({"step": 3, "loss": 1.0})
        board.close()
