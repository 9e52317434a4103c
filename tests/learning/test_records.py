"""metrics.jsonl has one line a record, in valid JSON, and no line twice after a resume."""

import json
import math
import random

from dispfx.learning.records import METRICS_FILE, MetricsLog, Pace, StepRecord


def record(step: int, loss: float = 1.5) -> StepRecord:
    return StepRecord(step, 10, loss, 0.1, 0.29, 1000.0, 3.0)


def lines(folder) -> list[dict]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    text = (folder / METRICS_FILE).read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_each_record_is_a_line_with_its_fields(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.append(record(1))
        log.append(record(2))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert lines(tmp_path)[0]["achieved_ratio"] == 0.29


def test_a_number_that_is_not_finite_is_null(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        log.append(record(1, math.nan))
    assert lines(tmp_path)[0]["loss"] is None


def test_a_resumed_run_drops_the_lines_of_steps_that_it_does_again(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3, 4):
            log.append(record(step))
    with (tmp_path / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "lo')
    with MetricsLog(tmp_path, 2) as log:
        log.append(record(3))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [METRICS_FILE]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with MetricsLog(None, 0) as log:
        log.append(record(1))
    assert list(tmp_path.iterdir()) == []


def test_time_left_is_within_a_tenth_after_the_first_hundred_steps(monkeypatch):
    noise = random.Random(0)
    steps = 1_000
    seconds = [
        noise.uniform(0.7, 1.3) + 3 * (step % 50 == 0) + 4 * (step % 100 == 0) for step in range(steps)
    ]
    seconds[:2] = [90.0, 30.0]  # compiles
    ends = [sum(seconds[: step + 1]) for step in range(steps)]
    clock = iter([0.0, *ends])
    monkeypatch.setattr("dispfx.learning.records.perf_counter", lambda: next(clock))
    pace = Pace(tokens_per_step=50)
    errors = []
    for step in range(steps):
        _, seconds_left = pace.tick(steps - step - 1)
        truth = ends[-1] - ends[step]
        if 100 <= step < steps - 100:
            errors.append(abs(seconds_left - truth) / truth)
    assert max(errors) < 0.1


def test_pace_gives_speed_and_time_left_of_the_last_steps(monkeypatch):
    clock = iter([0.0, 100.0, *(100.0 + step for step in range(1, 40))])
    monkeypatch.setattr("dispfx.learning.records.perf_counter", lambda: next(clock))
    pace = Pace(tokens_per_step=50)
    assert pace.tick(10) == (0.5, 1000.0)
    for _ in range(30):
        speed, seconds_left = pace.tick(10)
    assert (speed, seconds_left) == (50.0, 10.0)
