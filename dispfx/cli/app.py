"""The verbs in one list, and the entry point of the `dispfx` command."""

import sys
from io import TextIOWrapper
from typing import Annotated

import typer

from dispfx import __version__
from dispfx.cli import evaluating, making, measuring, showing, tuning, using
from dispfx.cli.examples import epilog
from dispfx.cli.repeating import Repeating
from dispfx.errors import DispfxError
from dispfx.launcher import end_with_launcher
from dispfx.preconditions import check_current_folder

app = typer.Typer(
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
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


def main() -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 the input's fault, 130 interrupted."""
    end_with_launcher()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A sign that an encoding such as ISO 8859-1 lacks must not end a run that has done its work.
            stream.reconfigure(errors="replace")
    app()
