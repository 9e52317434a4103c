"""What a resumed run finds complete: the output of an earlier run with the same settings, made from the same.

Names are compared first, because a message can say how they differ, and then the content.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import OutputError
from dispfx.files.disk import remove_abandoned
from dispfx.plan.family import Family, stored_plans
from dispfx.plan.plan import Plan
from dispfx.report import Observer, Report, Tuning, load_report
from dispfx.report.tuning_record import read_record
from dispfx.run.folders import require_unchanged
from dispfx.run.made_from import made_by, made_by_recovery, require_made_from
from dispfx.run.plan_learning import remove_state, state_folder
from dispfx.run.readiness import ready_to_learn
from dispfx.run.recovery_job import Recovery
from dispfx.run.targets import export_of
from dispfx.run.timed_stages import Stages
from dispfx.settings import RunSettings
from dispfx.settings.tree import plain_section
from dispfx.settings.trees import RecoverSettings
from dispfx.words.option_names import option

# Sections of the settings that decide what a run makes.  All others, and what is adapted to a decoder,
# say where and how it runs.
_DECIDING = ("model", "text", "budget", "learning", "afterwards")
_ADAPTED = ("device", "align")


def complete_report(settings: RunSettings, stages: Stages, ranks: Ranks = ALONE) -> Report | None:
    """Return the report of a folder that a resumed run finds complete, else None.

    Raises:
        OutputError: if it was made with other settings or from something else, or has changed since.
        DispfxError: for everything in the input that cannot be used.
    """
    path = settings.output.path
    if not (settings.output.resume and (path / "report.json").is_file()):
        return None
    report = load_report(path / "report.json")
    if report.settings is not None:
        _require_same(path, _deciding(report.settings), _deciding(settings.plain()))
    require_unchanged(path)
    ready = ready_to_learn(settings, stages, ranks=ranks)
    require_made_from(path, Plan.load(path / PLAN_FILE).made_from, made_by(settings, ready))
    if report.settings is not None:
        made, asked = (
            export_of(one, ready.source)
            for one in (report.settings["output"]["export"], settings.output.export)
        )
        if made != asked:
            raise OutputError(
                f"the output is complete and was made with {option('export', made)}, not {asked}",
                where=str(path),
                hint="`dispfx export` adds a form to a folder",
            )
    _say(path, stages.observer)
    return report


def complete_plan(settings: RunSettings, stages: Stages, ranks: Ranks = ALONE) -> Plan | Family | None:
    """Return the plan, or the family of a range of ratios, that a resumed run finds complete, else None.

    Raises:
        OutputError: if it was made with other settings or from something else.
        DispfxError: for everything in the input that cannot be used.
    """
    path = settings.output.path
    if not (settings.output.resume and path.is_file()):
        return None
    found = stored_plans(path)
    if isinstance(found, Family):
        plan, ratios = found.plan, (found.smallest, found.largest)
    else:
        plan, ratios = found, (found.budget.ratio, found.budget.ratio)
    asked, made = settings.budget, plan.budget
    # With constraints the ratio is what they needed.
    _require_same(
        path,
        {"kv_ratio": made.kv_ratio, "constraint": [*made.constraints]}
        | ({} if made.constraints else {"ratio": list(ratios)}),
        {"ratio": list(asked.ratios), "kv_ratio": asked.kv_ratio, "constraint": [*asked.constraint]},
    )
    ready = ready_to_learn(settings, stages, ranks=ranks)
    require_made_from(path, plan.made_from, made_by(settings, ready))
    _say(path, stages.observer)
    # A run that is killed when it has just named the plan leaves the temporary name.
    remove_abandoned(path)
    return found


def complete_recovery(settings: RecoverSettings, job: Recovery, stages: Stages) -> Tuning:
    """Return the record of the complete folder that a resumed recovery finds.

    Args:
        job: of these settings.

    Raises:
        OutputError: if it was made with other settings or from something else, or has changed since.
    """
    path = job.path
    record = read_record(path)
    require_unchanged(path)
    chosen = {name: one for name, one in plain_section(settings.recovery).items() if one is not None}
    asked = chosen | {"model": settings.model.model, "dense": settings.teacher.dense}
    made = {name: getattr(record, name) for name in chosen if hasattr(record, name)}
    _require_same(path, made | {"model": record.base, "dense": record.dense}, asked)
    require_made_from(path, record.made_from, made_by_recovery(job))
    _say(path, stages.observer)
    return record


def _deciding(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that decide what a run makes, by name."""
    adapted = {*_ADAPTED, "adaptable", *plain["learning"]["adaptable"]}
    known = RunSettings.settings()
    return {
        name: value
        for section in _DECIDING
        for name, value in plain[section].items()
        if name in known and name not in adapted and not known[name].facts.per_run
    }


def _require_same(path: Path, made: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise if settings that both have differ; a path may be spelled in another way."""
    for name in [one for one in asked if one in made]:
        if _resolved(made[name]) != _resolved(asked[name]):
            raise OutputError(
                f"the output is complete and was made with other settings: {name} was {made[name]} and is "
                f"{asked[name]} now",
                where=str(path),
                hint=f"name another output with {option('out')}",
            )


def _resolved(value: Any) -> list[Any]:
    """Return a value, or several, with the names of existing files and folders in full."""
    values = value if isinstance(value, list) else [value]
    return [
        str(Path(one).expanduser().resolve())
        if isinstance(one, str) and Path(one).expanduser().exists()
        else one
        for one in values
    ]


def _say(path: Path, observer: Observer) -> None:
    observer.note(f"{path} is complete; there is nothing to do")
    remove_state(state_folder(path, True))
