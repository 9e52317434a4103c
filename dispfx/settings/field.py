"""One setting: its default, documentation, unit, range and spelling, in one place.

    @dataclass(frozen=True)
    class LearnSettings(Section):
        steps: int = setting(10_000, "Optimizer steps.", default="5,000; demo: 400", least=1)

Such a dataclass is a *section*.  The command line, its help, the API and the report read
the same fields, so a setting is described once.  The type of a field names its choices (`Literal`).
"""

import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dispfx.errors import DispfxError, UnknownSettingError
from dispfx.words.choices import closest, require_choice
from dispfx.words.given import shown
from dispfx.words.option_names import flag, option
from dispfx.words.own_function import names_function

_KEY = "dispfx"
# Whole numbers are sizes and counts, whose product of two fits into 64 bits; these may be larger.
_MOST = 2**31 - 1
_LARGER = frozenset({"seed", "tokens", "data_bytes"})
_MOST_OF_LARGER = 2**63 - 1
# Texts that may name a file or a folder, besides paths.
_PLACES = frozenset({"model", "dense", "tokenizer", "data", "eval_data"})


@dataclass(frozen=True)
class Setting:
    """What is known about one field of a section.

    Args:
        doc: one sentence, for help, API reference and error messages.
        default: the default as shown to users, if it depends on other settings.
        least: smallest value; `above` excludes the bound itself.
        most: largest value; `below` excludes the bound itself.
        metavar: placeholder of the value in help.
        common: whether most runs need it, so that help lists it first.
        functions: whether `file.py:function` or a Python function is accepted instead of a choice.
        takes: type on the command line, if it is narrower than the field's.
        repeats: type of one value, or its choices, if the option may be repeated.
        once: what to do instead of giving the option twice; otherwise the last one counts.
        on_command_line: False for a setting that only the API has.
        error: exception class for a number outside the range.
        per_run: whether it affects where and how a run executes but not its result; `--config` ignores it.
    """

    doc: str
    default: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    metavar: str | None = None
    common: bool = False
    functions: bool = False
    takes: type | None = None
    repeats: Any = None
    once: str = ""
    on_command_line: bool = True
    error: type[DispfxError] = DispfxError
    per_run: bool = False

    def range_text(self) -> str:
        """Return the allowed range as text, or an empty string."""
        if self.above is not None and self.below is not None:
            return f"between {self.above:g} and {self.below:g}"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(
            f"{word} {bound:{',' if isinstance(bound, int) else 'g'}}"
            for word, bound in bounds.items()
            if bound is not None
        )

    def allows(self, value: float) -> bool:
        """Whether a finite number lies in the range."""
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def hint_for(self, value: float) -> str | None:
        """Return what a percentage that was given for a share is as a share, or None."""
        is_share = (self.above, self.below) == (0.0, 1.0)
        return f"{value / 100:g} is {value:g}%" if is_share and 1.0 < value < 100.0 else None


def setting(value: Any, doc: str, **facts: Any) -> Any:
    """Return a dataclass field with a default and its `Setting`."""
    return field(default=value, metadata={_KEY: Setting(doc, **facts)})


def required(doc: str, **facts: Any) -> Any:
    """Return a dataclass field without a default."""
    return field(metadata={_KEY: Setting(doc, **facts)})


def same_as(section: type, name: str) -> Any:
    """Return a dataclass field with the default and the `Setting` of another section's field."""
    known = next(one for one in fields(section) if one.name == name)
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True)
class Field:
    """One setting of a section, resolved: name, type and facts."""

    name: str
    kind: Any
    value: Any
    facts: Setting

    @property
    def option(self) -> str:
        """Spelling on the command line, such as `--lambda` for `lambda_`."""
        return flag(self.name)

    @property
    def typed(self) -> Any:
        """Type of a value on the command line: without None, and a list if the option may be repeated."""
        if self.facts.repeats is not None:
            return list[self.facts.repeats]
        if self.facts.takes is not None:
            return self.facts.takes
        kinds = [kind for kind in _members(self.kind) if kind is not type(None)]
        named = self.facts.functions or str in kinds[1:]
        return kinds[0] | str if named else kinds[0]

    @property
    def kind_name(self) -> str:
        """Type of a value as text."""
        if self.facts.repeats is not None:
            return f"a list of {' or '.join(self.choices) or self.facts.repeats.__name__}"
        if self.choices:
            return " or ".join(self.choices)
        named = typing.get_args(self.typed) or (self.typed,)
        return "str" if self.kind is Any else " or ".join(getattr(one, "__name__", "str") for one in named)

    def takes(self, value: Any) -> bool:
        """Whether a value from a JSON file has the type of the setting; ranges are checked elsewhere."""
        members = _members(self.kind)
        if value is None:
            return type(None) in members or self.kind is Any
        if self.facts.repeats is not None:
            several = value if isinstance(value, list) else [value]
            return all(_is_a(entry, self.facts.repeats) for entry in several)
        return any(_is_a(value, kind) for kind in (self.facts.takes or self.typed, *members))

    @property
    def is_number(self) -> bool:
        """Whether a value is one number, or one of True and False; some may also be named by a text."""
        alone = self.facts.repeats is None and self.facts.takes is None
        members = {*_members(self.kind)} - {type(None), str}
        return alone and bool(members) and members <= {int, float, bool}

    @property
    def names_place(self) -> bool:
        """Whether a value names a file, a folder, or what may be one."""
        return self.is_path or self.name in _PLACES

    @property
    def is_path(self) -> bool:
        """Whether a value is a path, or several."""
        return Path in (self.facts.takes, self.facts.repeats, *_members(self.kind))

    def require_named(self, value: Any) -> None:
        """Raise for an empty path or name: as a path it would be the current folder.

        Raises:
            DispfxError: with the setting.
        """
        values = value if isinstance(value, list | tuple) else [value]
        if self.names_place and any(isinstance(one, str) and not one for one in values):
            raise self.facts.error(f"{option(self.name)} must not be empty")

    def plain(self, value: Any) -> Any:
        """Return a value as it is, or the number of Python's for one of numpy's or a tensor.

        Raises:
            DispfxError: if the setting is a number and the value is no number, or one of another type.
        """
        if self.kind is str and not self.names_place and not isinstance(value, str):
            raise self.facts.error(
                f"a text was expected for {option(self.name)}, but {shown(value)} was given"
            )
        if not self.is_number:
            return value
        if getattr(value, "ndim", None) == 0 and (item := getattr(value, "item", None)) is not None:
            value = item()
        if value is None and self.value is None:
            return value
        if not self.takes(value):
            number = {bool: "True or False", int: "a whole number"}.get(self.typed, "a number")
            raise self.facts.error(f"{option(self.name)} must be {number}, and {value!r} was given")
        return value

    def require(self, value: Any) -> None:
        """Raise unless the setting may have a value; None stands for its default.

        Raises:
            DispfxError: with the setting, the allowed values, and the given one.
        """
        if value is None:
            return
        self.require_named(value)
        values = value if isinstance(value, list | tuple) else [value]
        if self.choices and not (self.facts.functions and names_function(value)):
            for chosen in values:
                require_choice(self.choices, chosen, option(self.name))
        for number in values:
            if is_number(number) and (allowed := self.required_range(number)) is not None:
                raise self.facts.error(
                    f"{option(self.name)} must be {allowed}, and {number!r} was given",
                    hint=self.facts.hint_for(number),
                )

    def required_range(self, number: float) -> str | None:
        """Return what a number must be, or None if the setting allows it.  Every whole number has a bound."""
        if isinstance(number, int):
            most = _MOST if int in (*_members(self.kind), self.facts.repeats) else _MOST_OF_LARGER
            most = _MOST_OF_LARGER if self.name in _LARGER else most
            if abs(number) > most:
                return f"at most {most:,}" if number > 0 else self.facts.range_text() or f"at least {-most:,}"
        return None if self.facts.allows(number) else self.facts.range_text() or "a finite number"

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.value is MISSING

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed choices, of each value where there may be several; empty if any value is allowed."""
        kinds = [kind for member in _members(self.kind) for kind in (member, *typing.get_args(member))]
        return next((typing.get_args(kind) for kind in kinds if _is_literal(kind)), ())


@cache
def section_fields(section: type) -> tuple[Field, ...]:
    """Return the settings of a section, in order."""
    hints = typing.get_type_hints(section)
    return tuple(
        Field(one.name, hints[one.name], one.default, one.metadata[_KEY])
        for one in fields(section)
        if _KEY in one.metadata
    )


def field_of(section: type, name: str) -> Field:
    """Return one setting of a section."""
    return next(one for one in section_fields(section) if one.name == name)


class Section:
    """Base of a frozen dataclass whose fields are settings: every choice and number is checked.

    A number of numpy's or a tensor's becomes one of Python's, which a report can hold.

    Raises:
        DispfxError: with the setting, the allowed values, and the given one.
    """

    def __post_init__(self) -> None:
        for one in section_fields(type(self)):
            value = one.plain(getattr(self, one.name))
            if value is not None and one.is_number:
                object.__setattr__(self, one.name, value)
            one.require(value)


def plain_values(section: type, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for settings of a section with Python's own numbers (`Field.plain`)."""
    known = {one.name: one for one in section_fields(section)}
    return {name: known[name].plain(value) if name in known else value for name, value in chosen.items()}


def refuse_unknown_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Pass if every name is a known setting.

    Raises:
        UnknownSettingError: naming the first unknown setting, and the closest known ones.
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise UnknownSettingError(f"there is no setting {name!r}", hint=closest(name, known))


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_a(value: Any, kind: Any) -> bool:
    if kind in (str, Any, Path) or _is_literal(kind):
        return isinstance(value, str)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return kind in (int, float) and isinstance(value, int if kind is int else int | float)


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python's, and not one of True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal
