"""`compile --from-report report.json`: the words of an earlier run in place of those that are not given.

1. A report holds the command that it is the result of, and every setting of the run.  Its words are taken as
   they are, so that the report of the run that repeats it can be repeated too; what only says where and how
   a run goes may be given anew.
2. What is given anew goes before the report's settings, and those before its words: the settings are what
   the run had after defaults, recipe and fitting, so none of today's defaults has a part in it.  A report of
   before there were settings in it is repeated by its words alone.
3. A report is data, perhaps from elsewhere.  Where to write is never taken from it, and nor is the leave to
   run code: that of a checkpoint, or a function that MODEL names.
"""

import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from dispfx.cli.faults import refused
from dispfx.errors import DataError, DispfxError
from dispfx.origin import origin_of

if TYPE_CHECKING:
    from dispfx.report import Report

NAME = "--from-report"
_START = ["dispfx", "compile"]
# Options that say where and how a run goes, and not what it gives; those that are followed by a word first.
_ANEW = ("--out", "--launch", "--save-every", "--max-bad-steps")
_TRUST = "--trust-remote-code"
_ANEW_FLAGS = ("--resume", "--dry-run", "--json", "--quiet", "--debug", _TRUST)


@dataclass(frozen=True)
class _Option:
    """One option of a command line, or one word that is none.

    Args:
        name: of the option, or the word.
        value: of the option, where it has one.
        words: as they were written.
    """

    name: str
    value: str | None
    words: tuple[str, ...]


class Repeating(TyperCommand):
    """The command `compile`, which puts the words of a report in place of `--from-report`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words as if the user had written out those of the report."""
        if not any(word.partition("=")[0] == NAME for word in args):
            return super().parse_args(ctx, args)
        try:
            args, asks_for_trust = repeated(args, self._valued())
            # The processes that the run starts, and its own report, follow from these.
            sys.argv[1:] = ["compile", *args]
            rest = super().parse_args(ctx, args)
            if (asks_for_trust or _is_function(ctx.params["model"])) and not ctx.params["trust_remote_code"]:
                raise DispfxError(
                    "the run of this report executes code that comes with the model",
                    where=ctx.params["model"],
                    hint=f"read that code, then allow it with {_TRUST}",
                )
        except DispfxError as error:
            raise refused(error) from None
        return rest

    def _valued(self) -> set[str]:
        """Return the names of the options that are followed by a word."""
        return {
            name
            for parameter in self.params
            if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
            for name in parameter.opts
        }


def repeated(words: Sequence[str], valued: Collection[str]) -> tuple[list[str], bool]:
    """Return the words of the run that wrote a report with those given anew, and whether it trusted code.

    Args:
        words: after `compile`.
        valued: options that are followed by a word.

    Raises:
        DataError: if there is no report, or it is not of a command line that ran `compile`.
        DispfxError: if something is given that belongs to the report, or no folder to write.
    """
    given = _options(words, valued)
    named = [option.value for option in given if option.name == NAME]
    anew = [option for option in given if option.name != NAME]
    odd = [option.name for option in anew if option.name not in (*_ANEW, *_ANEW_FLAGS)]
    if odd or len(named) != 1 or named[0] is None:
        raise DispfxError(
            f"{NAME} takes one report, and MODEL and options from it"
            + (f"; {odd[0]!r} was given too" if odd else ""),
            hint=f"beside it: {', '.join((*_ANEW, *_ANEW_FLAGS))}",
        )
    if "--out" not in {option.name for option in anew}:
        raise DispfxError(f"{NAME} needs a new folder to write", hint="add --out DIR")
    # Not before it is needed: the report's form is not known without torch.
    from dispfx.report import load_report

    path = Path(named[0]).expanduser()
    report = load_report(path)
    own = _options(_words_of(report, path), valued)
    return _merged(own, _settings_of(report, anew), anew), any(option.name == _TRUST for option in own)


def _merged(own: Iterable[_Option], settings: dict[str, str], anew: Sequence[_Option]) -> list[str]:
    """Return a command line in which what was given anew goes before settings, and those before words."""
    names = {option.name for option in anew}
    replaced = {*names, *_ANEW_FLAGS, *settings}
    if settings:
        replaced |= {"--antithetic", "--no-antithetic", "--constrained"}
    kept = [word for option in own if option.name not in replaced for word in option.words]
    set_ = [word for name, word in settings.items() if name not in names]
    return [*kept, *set_, *(word for option in anew for word in option.words)]


def _settings_of(report: "Report", anew: Iterable[_Option]) -> dict[str, str]:
    """Return the settings of a report as words, by the names of their options; none where it has none.

    With another number of processes, a batch that nobody chose may become one that they can share.
    """
    if report.settings is None:
        return {}
    from dispfx.api.fitting import settings_among
    from dispfx.report.settings import settings_words

    settings = report.settings
    launched = [option.value for option in anew if option.name == "--launch"]
    if launched and (launched[-1] or "").isdecimal() and int(launched[-1] or 0):
        settings = replace(settings, learning=settings_among(int(launched[-1] or 0), settings.learning))
    return {**settings_words(settings), "--ratio-of": f"--ratio-of={report.ratio.of}"}


def _is_function(model: str) -> bool:
    try:
        return origin_of(model) == "function"
    except DispfxError:
        return False  # whatever it is, the run will say so


def _words_of(report: "Report", path: Path) -> list[str]:
    try:
        words = shlex.split(report.command)
    except ValueError:
        words = []
    if words[:2] != _START or not report.command.startswith(shlex.join(_START)):
        raise DataError(
            f"the report is of no `dispfx compile` on a command line but of {report.command[:80]!r}",
            where=str(path),
            hint="repeat that call",
        )
    return words[2:]


def _options(words: Sequence[str], valued: Collection[str]) -> list[_Option]:
    """Return options with their values, and every other word by itself."""
    found: list[_Option] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in valued:
            found.append(_Option(word, None, (word,)))
        elif equals:
            found.append(_Option(name, value, (word,)))
        else:
            following = next(rest, None)
            found.append(_Option(name, following, (word,) if following is None else (word, following)))
    return found
