"""A verb of the command line, generated from a tree of settings.

1. Every setting of the tree becomes one option; its help, choices, range and default come from the field.
2. An option that the user does not give is left out, so that the tree's own default holds.
3. Settings that most runs need come first; the others follow in groups, one per section.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from dispfx.cli.screen import Screen
from dispfx.settings.field import Field, section_fields
from dispfx.settings.tree import Tree

_COMMON = Group("Most runs", help="What most runs need; everything else has a default.", sort_key=0)


@dataclass(frozen=True)
class Verb:
    """One verb.

    Args:
        name: as it is typed.
        run: does the work with the settings and the screen.
        tree: class of its settings.
        positional: settings without an option name, in order.
        required: settings that must be given.
        without: settings of the tree that the verb has no use for.
        defaults: values that differ from those of the tree.
    """

    name: str
    run: Callable[[Any, Screen], None]
    tree: type[Tree]
    positional: tuple[str, ...] = ("model",)
    required: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def signature(self) -> inspect.Signature:
        """Return one parameter per setting, positional ones first, and those of the screen last."""
        fields = {name: one for name, one in self.tree.settings().items() if name not in self.without}
        first = [self._parameter(fields.pop(name), None, position=True) for name in self.positional]
        rest = [
            self._parameter(one, self._group(number, section, one))
            for number, section in enumerate(self.tree.sections().values(), start=1)
            for one in section_fields(section)
            if one.name in fields and one.facts.on_command_line
        ]
        screen = Group("Screen", help="What is printed.", sort_key=99)
        shown = [self._parameter(one, screen) for one in section_fields(Screen)]
        return inspect.Signature([*first, *rest, *shown])

    def _group(self, number: int, section: type, one: Field) -> Group:
        if one.facts.common or one.name in self.required:
            return _COMMON
        title = section.__name__.removesuffix("Settings")
        return Group(title, help=(section.__doc__ or "").partition("\n")[0], sort_key=number)

    def _parameter(self, one: Field, group: Group | None, position: bool = False) -> inspect.Parameter:
        needed = one.name in self.required or (position and one.required)
        kind = inspect.Parameter.POSITIONAL_ONLY if position else inspect.Parameter.KEYWORD_ONLY
        annotation = one.typed if needed else one.typed | None
        return inspect.Parameter(
            one.name,
            kind,
            default=inspect.Parameter.empty if needed else None,
            annotation=Annotated[annotation, self._facts(one, group)],
        )

    def _facts(self, one: Field, group: Group | None) -> Parameter:
        facts = one.facts
        bounds = {"gte": facts.least, "gt": facts.above, "lte": facts.most, "lt": facts.below}
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        negative = f"--no-{one.option[2:]}" if one.typed is bool and one.facts.default else ()
        return Parameter(
            name=None if group is None else one.option,
            help=_help(one, self.defaults.get(one.name, one.value)),
            group=group,
            negative=negative,
            negative_iterable=(),
            show_default=False,
            validator=Number(**given) if given else None,
        )


def _help(one: Field, value: Any) -> str:
    default = one.facts.default
    if not default and isinstance(value, str | int | float) and not isinstance(value, bool):
        default = f"{value:,}" if isinstance(value, int) else str(value)
    return one.facts.doc + (f" [default: {default}]" if default else "")
