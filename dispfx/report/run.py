"""One compilation, read back from its folder: report, plan, learning log, measured speed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dispfx.deploy.digests import identity
from dispfx.errors import DataError, OutputError
from dispfx.files.json_text import parse_json, read_json
from dispfx.learning.records import METRICS_FILE, StepRecord
from dispfx.plan.plan import Plan
from dispfx.report.evaluation import EVALUATION_FILE, Evaluation, read_evaluation
from dispfx.report.json_form import load_report
from dispfx.report.schema import Report

REPORT_FILE, PLAN_FILE, SPEED_FILE = "report.json", "plan.safetensors", "speed.json"


@dataclass(frozen=True, eq=False)
class Run:
    """The records of a folder.

    Args:
        name: of the folder.
        report: report.json.
        plan: the kept features of every site.
        steps: of learning, in order; empty if nothing was learned.
        speed: speed.json as `dispfx bench DIR --out DIR` writes it, or None.
        evaluation: eval.json as `dispfx eval DIR --out DIR` writes it, or None.
        left_out: a sentence for each of the two files that is not of this decoder, which is not shown.
    """

    name: str
    report: Report
    plan: Plan
    steps: tuple[StepRecord, ...] = ()
    speed: Mapping[str, Any] | None = None
    evaluation: Evaluation | None = None
    left_out: tuple[str, ...] = ()


def read_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a folder, without its weights.

    Speed and evaluation of another decoder, or of this one before its weights changed, are left out.

    Args:
        name: to show; by default that of the folder.

    Raises:
        OutputError: if dispfx did not write the folder.
        DataError: if a file in it is damaged.
    """
    path = Path(folder).expanduser()
    for file in (REPORT_FILE, PLAN_FILE):
        if not (path / file).is_file():
            raise OutputError(
                f"a folder that dispfx wrote is needed, but this one has no {file}",
                where=str(path),
                hint="pass a folder that `dispfx compile` wrote",
            )
    report = load_report(path / REPORT_FILE)
    speed, evaluation = _read_speed(path / SPEED_FILE), read_evaluation(path / EVALUATION_FILE)
    decoders = {}
    if speed is not None:
        decoders[SPEED_FILE] = speed.get("decoder")
    if evaluation is not None:
        decoders[EVALUATION_FILE] = evaluation.decoder
    own = identity(report.files)
    other = [file for file, decoder in decoders.items() if own is None or decoder != own]
    return Run(
        name or path.resolve().name,
        report,
        Plan.load(path / PLAN_FILE),
        read_steps(path / METRICS_FILE),
        None if SPEED_FILE in other else speed,
        None if EVALUATION_FILE in other else evaluation,
        tuple(_left_out(file, decoders[file]) for file in other),
    )


def _left_out(file: str, decoder: str | None) -> str:
    of = "is of another decoder, or of other weights"
    if decoder is None:
        of = "does not say which decoder it is of"
    return f"{file} {of}, so it is not shown; measure this folder again"


def read_steps(path: Path) -> tuple[StepRecord, ...]:
    """Read metrics.jsonl; empty if the file is missing.  null is read as NaN.

    Raises:
        DataError: with the first invalid line.
    """
    if not path.is_file():
        return ()
    steps = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            steps.append(_step(parse_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"this line is not a step of learning: {error}", where=f"{path}:{number}"
            ) from error
    return tuple(steps)


def _step(values: dict[str, Any]) -> StepRecord:
    known = {field.name for field in fields(StepRecord)}
    kept = {name: value for name, value in values.items() if name in known}
    for name in ("loss", "budget_loss", "achieved_ratio"):
        kept[name] = math.nan if kept[name] is None else float(kept[name])
    return StepRecord(**kept)


def _read_speed(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        speed = read_json(path)
    except ValueError as error:
        raise DataError(f"this file is not a speed table: {error}", where=str(path)) from error
    if not isinstance(speed, dict) or not isinstance(speed.get("rows"), list):
        raise DataError("this file is not a speed table: it has no rows", where=str(path))
    if not all(_is_row(row) for row in speed["rows"]):
        raise DataError("this file is not a speed table: a row has no time ratio", where=str(path))
    return speed


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    ratio = row.get("speedup")
    return ratio is None or (isinstance(ratio, int | float) and math.isfinite(ratio))
