"""The verbs in one list, and the entry point of the `dispfx` command."""

import difflib
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dispfx import __version__
from dispfx.cli import evaluating, making, measuring, showing, tuning, using
from dispfx.cli.examples import epilog
from dispfx.cli.faults import Fault, print_fault, refused
from dispfx.cli.repeating import Repeating
from dispfx.errors import DispfxError
from dispfx.launcher import end_with_launcher
from dispfx.preconditions import check_current_folder

# Verbs of other programs, and what they are called here.
_MEANT = {
    **dict.fromkeys(("prune", "compress", "shrink", "slice", "run", "build"), "compile"),
    **dict.fromkeys(("info", "show", "analyze", "analyse", "ls"), "inspect"),
    **dict.fromkeys(("evaluate", "perplexity", "ppl", "measure"), "eval"),
    **dict.fromkeys(("benchmark", "speed", "time"), "bench"),
    **dict.fromkeys(("tune", "train", "fine-tune", "recover", "lora"), "finetune"),
    **dict.fromkeys(("check", "test", "validate"), "verify"),
    **dict.fromkeys(("onnx", "convert", "save"), "export"),
    **dict.fromkeys(("chat", "sample", "complete"), "generate"),
    "diff": "compare",
    "lower": "apply",
}
# typer has a copy of click's classes in some versions, so this one is found by what it exports.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class Verbs(TyperGroup):
    """The verbs: an unknown one is told the one that is meant, and wrong arguments are told in JSON too."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if "--json" in sys.argv:
                print_fault(Fault("UsageError", error.format_message()))  # type: ignore[attr-defined]
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the verb of that name."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0].lower(), [*self.commands, *_MEANT], 1)
            hint = f"did you mean {_MEANT.get(near[0], near[0])}?" if near else None
            known = f"the commands are {', '.join(self.commands)}"
            ctx.fail(f"No such command {args[0]!r}: {hint or known}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs,
    name="dispfx",
    help="A compiler that makes a decoder language model smaller, without knowing its architecture.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_VERBS = (
    making.compile,
    using.inspect,
    making.learn,
    making.apply,
    using.verify,
    evaluating.evaluate,
    using.export,
    using.generate,
    measuring.bench,
    tuning.finetune,
    showing.report,
    showing.compare,
    showing.doctor,
)
for _verb in _VERBS:
    # `eval` is a name that Python has given away.
    _name = "eval" if _verb is evaluating.evaluate else _verb.__name__
    _class = Repeating if _verb is making.compile else None
    app.command(name=_name, epilog=epilog(_name), cls=_class)(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dispfx {__version__}")
        raise typer.Exit


@app.callback()
def _dispfx(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    try:
        check_current_folder()
    except DispfxError as error:
        raise refused(error) from None


def main() -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 the input's fault, 130 interrupted."""
    end_with_launcher()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A sign that an encoding such as ISO 8859-1 lacks must not end a run that has done its work.
            stream.reconfigure(errors="replace")
    app()
