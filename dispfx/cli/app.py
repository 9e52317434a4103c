"""The verbs in one list, and the entry point of the `dispfx` command."""

from typing import Annotated

import typer

from dispfx import __version__
from dispfx.cli import evaluating, making, measuring, showing, tuning, using
from dispfx.cli.repeating import Repeating

app = typer.Typer(
    name="dispfx",
    help="A compiler that makes a decoder language model smaller, without knowing its architecture.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(cls=Repeating)(making.compile)
for verb in (using.inspect, making.learn, making.apply):
    app.command()(verb)
for verb in (using.verify, evaluating.evaluate, using.export, using.generate, measuring.bench):
    app.command(name="eval" if verb is evaluating.evaluate else None)(verb)
app.command()(tuning.finetune)

for verb in (showing.report, showing.compare, showing.doctor):
    app.command()(verb)


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
    pass


def main() -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 the input's fault, 130 interrupted."""
    app()
