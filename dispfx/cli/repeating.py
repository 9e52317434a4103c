"""`compile --from-report report.json`: the words of an earlier run in place of those that are not given.

1. A report holds the command that it is the result of.  Its words are taken as they are, so that the report
   of the run that repeats it can be repeated too; what only says where and how a run goes may be given anew.
2. A report is data, perhaps from elsewhere.  Where to write is never taken from it, and nor is the leave to
   run code: that of a checkpoint, or a function that MODEL names.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from dispfx.errors import DataError, DispfxError
from dispfx.origin import origin_of

NAME = "--from-report"
_START = ["dispfx", "compile"]
# Options that say where and how a run goes, and not what it gives; those that are followed by a word first.
_ANEW = ("--out", "--launch")
_TRUST = "--trust-remote-code"
_ANEW_FLAGS = ("--resume", "--dry-run", "--json", "--quiet", "--debug", _TRUST)


class Repeating(TyperCommand):
    """The command `compile`, which puts the words of a report in place of `--from-report`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words as if the user had written out those of the report."""
        if not any(word.partition("=")[0] == NAME for word in args):
            return super().parse_args(ctx, args)
        try:
            args, asks_for_trust = repeated(args)
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
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        return rest


def repeated(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words of the run that wrote a report with those given anew, and whether it trusted code.

    Args:
        words: after `compile`.

    Raises:
        DataError: if there is no report, or it is not of a command line that ran `compile`.
        DispfxError: if something is given that belongs to the report, or no folder to write.
    """
    given = _pairs(words)
    report = [value for name, value in given if name == NAME]
    anew = [(name, value) for name, value in given if name != NAME]
    odd = [name for name, _ in anew if name not in (*_ANEW, *_ANEW_FLAGS)]
    if odd or len(report) != 1 or report[0] is None:
        raise DispfxError(
            f"{NAME} takes one report, and MODEL and options from it"
            + (f"; {odd[0]!r} was given too" if odd else ""),
            hint=f"beside it: {', '.join((*_ANEW, *_ANEW_FLAGS))}",
        )
    names = {name for name, _ in anew}
    if "--out" not in names:
        raise DispfxError(f"{NAME} needs a new folder to write", hint="add --out DIR")
    own = _pairs(_words_of(Path(report[0])))
    kept = [(name, value) for name, value in own if name not in (*names, *_ANEW_FLAGS)]
    merged = [word for pair in (*kept, *anew) for word in pair if word is not None]
    return merged, (_TRUST, None) in own


def _is_function(model: str) -> bool:
    try:
        return origin_of(model) == "function"
    except DispfxError:
        return False  # whatever it is, the run will say so


def _words_of(path: Path) -> list[str]:
    # Not before it is needed: the report's form is not known without torch.
    from dispfx.report import load_report

    report = load_report(path.expanduser())
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


def _pairs(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return options that may be given anew with their values, and every other word by itself."""
    pairs: list[tuple[str, str | None]] = []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in (NAME, *_ANEW):
            pairs.append((name, value if equals else next(rest, None)))
        else:
            pairs.append((word, None))
    return pairs
