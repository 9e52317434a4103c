"""A verb of the command line, generated from a tree of settings.

1. Every setting of the tree becomes one option; its help, choices, range and default come from the field.
2. An option that the user does not give is left out, so that the tree's default applies.  None is no type of
   an option: the parser would take the word `none` for it, and any setting for one that was not given.
3. Settings that most runs need come first; all other settings follow in groups, one per section.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, Token

from dispfx.cli.examples import epilog
from dispfx.cli.faults import ends_with_message
from dispfx.cli.screen import Screen, spelled
from dispfx.settings.field import Field, is_number, section_fields
from dispfx.settings.tree import Tree

Given = dict[str, Any]
_COMMON = Group("Most runs", help="What most runs need; everything else has a default.", sort_key=0)
_SCREEN = Group("Screen", help="What is printed.", sort_key=99)
# Options that come first in a group.
_FIRST = ("ratio", "data", "eval_data", "out", "prompt")


class _Unchecked:
    """Lets pydantic take any value: once another library has loaded it, cyclopts checks defaults with it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import any_schema

        return any_schema()


_UNCHECKED = _Unchecked()


@dataclass(frozen=True)
class Verb:
    """One verb.

    Args:
        run: does the work with the settings and the screen; its docstring is the help.
        tree: class of its settings.
        name: as typed on the command line; that of `run` by default.
        positional: settings without an option name, in order, and the placeholder of each.
        required: settings that must be given.
        without: settings of the tree that the verb does not use.
        defaults: values that differ from those of the tree; None for optional ones.
        docs: sentences of help that differ from those of the tree.
        shown_defaults: defaults as the help shows them, if they differ from those of the tree.
        build: makes the settings from the arguments; `tree.of` by default.
    """

    run: Callable[[Any, Screen], None]
    tree: type[Tree]
    name: str = ""
    positional: Mapping[str, str] = field(default_factory=lambda: {"model": "MODEL"})
    required: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    docs: Mapping[str, str] = field(default_factory=dict)
    shown_defaults: Mapping[str, str] = field(default_factory=dict)
    build: Callable[[Given], Tree] | None = None

    @property
    def named(self) -> str:
        """As it is typed."""
        return self.name or self.run.__name__

    def add_to(self, app: App, sort_key: int) -> None:
        """Add the verb to the command line at its position in the list."""
        name, signature = self.named, self.signature()

        def command(*words: Any, **options: Any) -> None:
            given = dict(zip(self.positional, words, strict=False)) | options
            self._call({key: value for key, value in given.items() if value is not None})

        command.__name__, command.__doc__ = name, self.run.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        app.command(command, name=name, sort_key=sort_key, help_epilogue=epilog(name))

    def _call(self, given: Given) -> None:
        names = [one.name for one in section_fields(Screen)]
        screen = Screen(**{name: given.pop(name) for name in names if name in given})
        given = {name: value for name, value in {**self.defaults, **given}.items() if value is not None}
        with ends_with_message(screen, given, resumable="resume" in self.tree.settings()):
            build = self.build or (lambda found: self.tree.of(**found))
            self.run(build(given), screen)

    def signature(self) -> inspect.Signature:
        """Return one parameter per setting, positional ones first, and those of the screen last."""
        fields = {name: one for name, one in self.tree.settings().items() if name not in self.without}
        first = [self._positional(fields.pop(name), word) for name, word in self.positional.items()]
        rest = [
            self._option(one, self._group(number, section, one))
            for number, section in enumerate(self.tree.sections().values(), start=1)
            for one in section_fields(section)
            if one.name in fields and one.facts.on_command_line
        ]
        shown = [self._option(one, _SCREEN) for one in section_fields(Screen) if one.name not in self.without]
        rest.sort(key=lambda one: _FIRST.index(one.name) if one.name in _FIRST else len(_FIRST))
        return inspect.Signature([*first, *rest, *shown])

    def _group(self, number: int, section: type, one: Field) -> Group:
        if one.facts.common or one.name in self.required:
            return _COMMON
        title = section.__name__.removesuffix("Settings")
        return Group(title, help=(section.__doc__ or "").partition("\n")[0], sort_key=number)

    def _positional(self, one: Field, word: str) -> inspect.Parameter:
        needed = one.required and one.name not in self.defaults
        return inspect.Parameter(
            one.name,
            inspect.Parameter.POSITIONAL_ONLY,
            default=inspect.Parameter.empty if needed else None,
            annotation=Annotated[
                one.typed,
                Parameter(
                    name=word,
                    help=self._doc(one),
                    negative=(),
                    negative_iterable=(),
                    converter=_path(f"{word} must not be empty.") if one.is_path else None,
                    validator=_named if one.names_place else None,
                ),
                _UNCHECKED,
            ],
        )

    def _option(self, one: Field, group: Group) -> inspect.Parameter:
        needed = one.name in self.required
        facts = one.facts
        parameter = Parameter(
            name=one.option,
            help=self._help(one),
            group=group,
            # A flag that is on by default has a negative form.
            negative=None if one.typed is bool and facts.default else (),
            negative_iterable=(),
            show_default=False,
            validator=_in_range(one),
            converter=_path("It must not be empty.") if one.is_path else None,
            allow_leading_hyphen=one.typed in (str, list[str]),
            # If an option is given twice, the last one counts, unless a user would expect both.
            allow_repeating=None if one.facts.repeats else not one.facts.once,
        )
        return inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if needed else None,
            annotation=Annotated[one.typed, parameter, _UNCHECKED],
        )

    def _help(self, one: Field) -> str:
        value = self.defaults.get(one.name, one.value)
        default = self.shown_defaults.get(one.name, one.facts.default)
        if one.name in self.required:
            default = ""
        elif not default and isinstance(value, str | int | float | Path) and not isinstance(value, bool):
            default = f"{value:,}" if isinstance(value, int) else str(value)
        functions = " Or file.py:function." if one.facts.functions else ""
        within = one.facts.range_text() if one.facts.below is not None else ""
        notes = {"range": within, "default": default}
        shown = "".join(f" [{name}: {note}]" for name, note in notes.items() if note)
        return self._doc(one) + functions + shown

    def _doc(self, one: Field) -> str:
        return spelled(self.docs.get(one.name, one.facts.doc))


def _in_range(one: Field) -> Callable[[Any, Any], None]:
    """Return a validator that rejects numbers outside the range of a setting, and non-finite ones."""

    def check(kind: Any, value: Any) -> None:
        for number in value if isinstance(value, list | tuple) else [value]:
            if is_number(number) and (within := one.required_range(number)) is not None:
                hint, allowed = one.facts.hint_for(number), f"It must be {within}."
                raise ValueError(f"{allowed} {hint}." if hint else allowed)

    return check


def _path(problem: str) -> Callable[[Any, Sequence[Token]], Any]:
    """Return a converter of words to paths; an empty one would be the current folder, and is rejected."""

    def convert(kind: Any, tokens: Sequence[Token]) -> Any:
        words = [token.value for token in tokens]
        if "" in words:
            raise ValueError(problem)
        paths = [Path(word) for word in words]
        return paths if typing.get_origin(kind) is list else paths[0]

    return convert


def _named(kind: Any, value: Any) -> None:
    """Reject an empty word for an argument without an option name."""
    if value == "":
        raise ValueError("It must not be empty.")
