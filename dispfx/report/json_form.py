"""`Report` ⇄ report.json.

The JSON has the shape of the dataclasses.  Reading follows their annotations: a missing field or a wrong type
is an error with its place, and an unknown field, of a later version, is ignored.
JSON has no infinity and no NaN: both are written as null and read as NaN.
"""

import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispfx.errors import DataError, DispfxError
from dispfx.files.disk import replacing
from dispfx.files.json_text import parse_json
from dispfx.report.schema import Report
from dispfx.settings.stored import stored_sections

# Entries that are not written when they are empty.
_OPTIONAL = (
    "behaviour",
    "skills",
    "tuned",
    "files",
    "settings",
    "onnx_without_cache",
    "lengths",
    "cache",
    "kv_ratio",
    "constraints",
    "quantized",
)
Shape = typing.TypeVar("Shape")


def to_json(report: Report) -> str:
    """Return the report as indented JSON."""
    plain = to_plain(report)
    for absent in [name for name in _OPTIONAL if not getattr(report, name)]:
        del plain[absent]
    return json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def to_plain(value: Any) -> Any:
    """Return dataclasses as dicts, tuples as lists, and numbers that are not finite as None."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(text: str, where: str = "report.json") -> Report:
    """Read a report.

    Raises:
        DataError: if the text is not JSON, or a field is missing or of another type.
    """
    try:
        report = _read(Report, parse_json(text), "")
        if report.settings is None:
            return report
        return dataclasses.replace(report, settings=stored_sections(report.settings, strict=False))
    except ValueError as error:
        raise DataError(f"this is not a report: {error}", where=where, hint="pass a report.json") from error


def from_plain(kind: type[Shape], value: Any, where: str) -> Shape:
    """Read a dataclass written by `to_plain`; unknown fields are ignored.

    Raises:
        DataError: if a field is missing or of another type.
    """
    try:
        return _read(kind, value, "")
    except ValueError as error:
        raise DataError(f"this is not a {kind.__name__}: {error}", where=where) from error


def save_report(report: Report, path: str | os.PathLike[str]) -> None:
    """Write report.json atomically."""
    with replacing(path) as partial:
        partial.write_text(to_json(report), encoding="utf-8")


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read report.json.

    Raises:
        DataError: if it is missing, unreadable, or not a report.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the report cannot be read: {error}", where=str(path)) from error
    return from_json(text, str(path))


def _read(kind: Any, value: Any, at: str) -> Any:
    """Return `value` as `kind`; ValueError with the place `at` if it has another type."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, at)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        present = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _read(present, value, at)
    if origin is typing.Literal:
        return value if value in arguments else _wrong(at, " or ".join(map(str, arguments)), value)
    if origin is tuple:
        entries = value if isinstance(value, list) else _wrong(at, "a list", value)
        return tuple(_read(arguments[0], entry, f"{at}[{i}]") for i, entry in enumerate(entries))
    if origin is Mapping:
        entries = value if isinstance(value, dict) else _wrong(at, "an object", value)
        return {name: _read(arguments[1], entry, f"{at}.{name}") for name, entry in entries.items()}
    return _read_leaf(kind, value, at)


def _read_fields(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        return _wrong(at, "an object", value)
    hints = typing.get_type_hints(kind)
    given = {}
    for field in dataclasses.fields(kind):
        place = f"{at}.{field.name}".lstrip(".")
        if field.name in value:
            given[field.name] = _read(hints[field.name], value[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} is missing")
    try:
        return kind(**given)
    except DispfxError as error:  # a value with which no run makes sense
        raise ValueError(f"{at}: {error.problem}") from error


def _read_leaf(kind: Any, value: Any, at: str) -> Any:
    if kind is float and value is None:
        return math.nan
    allowed = (int, float) if kind is float else kind
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, allowed):
        return _wrong(at, kind.__name__, value)
    return kind(value)


def _wrong(at: str, required: str, value: Any) -> Any:
    raise ValueError(f"{at or 'it'} must be {required} and is {json.dumps(value)[:40]}")
