"""A tree of settings: sections under one name each, built from flat names and written as plain values.

RunSettings.of(model="demo", ratio=0.3, steps=100)      flat names, as options and keyword arguments
settings.budget.ratio                                   how code reads one
settings.plain()                                        what report.json stores, by section
"""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import PurePath
from typing import Any, Self

from dispfx.errors import DispfxError
from dispfx.settings.field import Field, refuse_unknown_names, section_fields
from dispfx.words.given import require_given
from dispfx.words.option_names import option


class Tree:
    """Base of a frozen dataclass whose fields are sections."""

    @classmethod
    @cache
    def sections(cls) -> Mapping[str, type]:
        """Return the class of every section by its name."""
        hints = typing.get_type_hints(cls)
        return {one.name: hints[one.name] for one in fields(typing.cast(Any, cls))}

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Field]:
        """Return every setting of the tree by its flat name.

        Raises:
            AssertionError: if two sections share a name.
        """
        found: dict[str, Field] = {}
        for section in cls.sections().values():
            for one in section_fields(section):
                assert one.name not in found, f"two sections of {cls.__name__} have {one.name}"
                found[one.name] = one
        return found

    @classmethod
    def settings_of(cls, section: str) -> tuple[str, ...]:
        """Return the names of one section's settings."""
        return _names_of(cls.sections()[section])

    @classmethod
    def of(cls, **flat: Any) -> Self:
        """Return the settings with these values; all others have their defaults.

        Raises:
            UnknownSettingError: if a name is unknown, with the closest known one.
            DispfxError: if a value makes no sense, or a required one is missing.
        """
        refuse_unknown_names(flat, cls.settings())
        for name, one in cls.settings().items():
            if one.required and name not in flat:
                raise DispfxError(f"{option(name)} is needed: {one.facts.doc}")
        return cls(**{name: cls._section(name, kind, flat) for name, kind in cls.sections().items()})

    @classmethod
    def given(cls, subject: Any, changes: Mapping[str, Any]) -> Self:
        """Return settings from the arguments of a function: settings or a model, and single settings.

        Args:
            subject: settings of this class, or the model that they are about.
            changes: single settings by flat name.

        Raises:
            UnknownSettingError, DispfxError: as `of`.
        """
        return subject.changed(**changes) if isinstance(subject, cls) else cls.of(model=subject, **changes)

    @classmethod
    def required(cls, value: Any) -> Self:
        """Return settings of this class.

        Raises:
            DispfxError: if the value is something else.
        """
        require_given(value, cls, f"{cls.__name__}.of(…) returns one")
        return value

    def changed(self, **flat: Any) -> Self:
        """Return the settings with other values.

        Raises:
            UnknownSettingError, DispfxError: as `of`.
        """
        refuse_unknown_names(flat, self.settings())
        changes = {}
        for name, kind in self.sections().items():
            own = {one: flat[one] for one in _names_of(kind) if one in flat}
            if own:
                changes[name] = replace(getattr(self, name), **own)
        return replace(typing.cast(Any, self), **changes)

    def plain(self) -> dict[str, dict[str, Any]]:
        """Return every value by section and name, ready for JSON."""
        return {name: plain_section(getattr(self, name)) for name in self.sections()}

    @classmethod
    def _section(cls, name: str, kind: type, flat: Mapping[str, Any]) -> Any:
        return kind(**{one: flat[one] for one in _names_of(kind) if one in flat})


_OBJECT = "object"


def _names_of(section: type) -> tuple[str, ...]:
    return tuple(one.name for one in section_fields(section))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [_plain(entry) for entry in value]
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return {_OBJECT: type(value).__qualname__}


def plain_section(section: Any) -> dict[str, Any]:
    """Return every value of a section by its name, ready for JSON."""
    return {one.name: _plain(getattr(section, one.name)) for one in fields(section)}


def is_of_a_program(plain: Any) -> bool:
    """Whether a plain value stands for a module or a tensor, which a file cannot restore."""
    return isinstance(plain, dict) and list(plain) == [_OBJECT]
