"""report.json: exactly the agreed fields, and nothing else is believed."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dispfx.errors import DataError
from dispfx.report import Report, from_json, load_report, save_report, to_json
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.trees import RunSettings

FIELDS: dict[str, Any] = {
    "ratio": {"requested", "achieved", "of"},
    "parameters": {"dense", "pruned", "gated"},
    "bytes": {"dense", "pruned"},
    "perplexity": {"dense", "pruned", "protocol"},
    "verify": {"name", "shape", "max_abs_error", "max_rel_error", "tolerance"},
    "sites": {"name", "kind", "size", "kept"},
    "refused": {"name", "reason"},
    "ungated": {"reason", "parameters", "paths"},
    "seed": int,
    "versions": {"python", "torch"},
    "device": str,
    "seconds": {"capture", "learn"},
    "command": str,
}


def test_the_file_has_the_agreed_fields(report: Report):
    plain = json.loads(to_json(dataclasses.replace(report, skills={})))
    assert set(plain) == set(FIELDS)
    for name, expected in FIELDS.items():
        found = plain[name][0] if isinstance(plain[name], list) else plain[name]
        if isinstance(expected, set):
            assert set(found) == expected, name
        else:
            assert isinstance(found, expected), name
    assert set(plain["perplexity"]["protocol"]) == {
        "text",
        "context",
        "windows",
        "tokens",
        "held_out_share",
        "bos",
        "unknown_share",
    }
    assert plain["verify"][0]["shape"] == [2, 9]


def test_what_is_written_is_read_back(report: Report, tmp_path: Path):
    path = tmp_path / "report.json"
    save_report(report, path)
    assert load_report(path) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_report_without_perplexity_and_skills_is_read_back(report: Report):
    bare = dataclasses.replace(report, perplexity=None, skills={}, refused=())
    assert from_json(to_json(bare)) == bare
    assert json.loads(to_json(bare))["perplexity"] is None


RUN = RunSettings.of(model="demo", ratio=0.3, align=8, select="before-norm", data_bytes=2**20)
SET = RUN.fitted(
    LearnSettings(method="fisher", steps=7, lr=1, samples=2, batch_size=4, adaptable=("samples",))
).plain()


def test_settings_are_read_back_and_absent_in_reports_that_have_none(report: Report):
    assert "settings" not in json.loads(to_json(report))
    told = dataclasses.replace(report, settings=SET)
    assert from_json(to_json(told)) == told


def test_a_setting_that_a_report_does_not_have_is_that_of_before(report: Report):
    plain = json.loads(to_json(dataclasses.replace(report, settings=SET)))
    del plain["settings"]["learning"]["temperature"]
    found = from_json(json.dumps(plain)).settings
    assert found == SET and LearnSettings().temperature == 1.0


def test_a_perplexity_that_is_not_finite_is_null_and_read_as_nan(report: Report):
    assert report.perplexity is not None
    blown = dataclasses.replace(report, perplexity=dataclasses.replace(report.perplexity, pruned=math.inf))
    text = to_json(blown)
    assert json.loads(text)["perplexity"]["pruned"] is None
    read = from_json(text).perplexity
    assert read is not None and math.isnan(read.pruned) and read.dense == report.perplexity.dense


def test_a_field_of_a_later_version_is_passed_over(report: Report):
    plain = json.loads(to_json(report)) | {"carbon": {"grams": 3}}
    assert from_json(json.dumps(plain)) == report


def test_a_whole_number_is_a_float_and_a_truth_value_is_no_number(report: Report):
    plain = json.loads(to_json(report))
    plain["seconds"]["learn"] = 60
    assert from_json(json.dumps(plain)) == report
    plain["seed"] = True
    with pytest.raises(DataError, match="seed must be int"):
        from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda plain: plain.pop("ratio"), "ratio is missing"),
        (
            lambda plain: plain["perplexity"]["protocol"].pop("context"),
            r"perplexity\.protocol\.context is miss",
        ),
        (lambda plain: plain["ratio"].update(of="layers"), r"ratio: of must be blocks or total"),
        (lambda plain: plain["parameters"].update(dense="many"), r"parameters\.dense must be int"),
        (lambda plain: plain.update(verify={}), "verify must be a list"),
        (lambda plain: plain["verify"][1].update(shape=[1, "x"]), r"verify\[1\]\.shape\[1\] must be int"),
        (lambda plain: plain.update(versions=[]), "versions must be an object"),
        (lambda plain: plain.update(sites=[3]), r"sites\[0\] must be an object"),
        (
            lambda plain: plain["settings"].pop("budget"),
            r"settings\.budget: `ratio` is needed, or `constraint`",
        ),
        (
            lambda plain: plain["settings"]["learning"].update(steps=0),
            r"settings\.learning: `steps` must be at le",
        ),
        (
            lambda plain: plain["settings"]["learning"].update(lr=None),
            r"settings\.learning\.lr must be float and is null",
        ),
        (
            lambda plain: plain["settings"]["learning"].update(antithetic=1),
            r"antithetic must be bool and is 1",
        ),
        (lambda plain: plain["settings"]["learning"].update(steps=True), r"steps must be int and is true"),
        (
            lambda plain: plain["settings"]["learning"].update(start="?"),
            r"`start` must be uniform or sensitivity",
        ),
        (lambda plain: plain["settings"]["learning"].update(samples=3), r"`samples` must be a divisor"),
    ],
)
def test_a_report_with_a_wrong_field_is_refused_by_its_place(report: Report, change, reason: str):
    plain = json.loads(to_json(dataclasses.replace(report, settings=SET)))
    change(plain)
    with pytest.raises(DataError, match=reason):
        from_json(json.dumps(plain))


def test_what_is_no_report_is_refused(tmp_path: Path):
    for text in ("", "[]", "null", "{", '"report"'):
        with pytest.raises(DataError, match="not a report"):
            from_json(text)
    with pytest.raises(DataError, match="cannot be read"):
        load_report(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        load_report(tmp_path / "binary.json")


def test_a_failed_write_leaves_nothing(report: Report, tmp_path: Path):
    unwritable = dataclasses.replace(report, versions={"torch": object()})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        save_report(unwritable, tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []
