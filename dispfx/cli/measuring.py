"""Verbs that measure a folder: bench."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.screen import Screen
from dispfx.origin import origin_of
from dispfx.preconditions import check_folder
from dispfx.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.measure.speed_row import SpeedRow


@reports_faults
def bench(
    folder: given.Folder,
    dense: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="What DIR was compiled from; the same class with random weights by default."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences (1, 8, 32, 128); can be given several times.")
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens of a prefill; can be given several times.")
    ] = None,
    past: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Cached tokens before a decode step; can be given several times."),
    ] = None,
    mode: Annotated[Literal["eager", "compiled", "both"], typer.Option(help="How steps run.")] = "both",
    runtime: Annotated[Literal["torch", "onnx"], typer.Option(help="What runs the decoders.")] = "torch",
    align: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Also the plan with widths that are multiples of this; can be given several times."
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(help="Text to measure the plan on at every --align, with --dense."),
    ] = None,
    eval_windows: given.EvalWindows = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write speed.md and speed.json to, after every row.")
    ] = None,
    device: given.Device = None,
    trust_remote_code: given.TrustRemoteCode = False,
    print_after: given.PrintAfter = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Time prefill and decode steps, pruned beside dense, with the largest possible speed-up."""
    check_folder(folder)
    check_texts(eval_data or [])
    if dense is not None:
        origin_of(dense)
    from dispfx import api
    from dispfx.report.speed import speed_line, speed_markdown, speed_plain, write_speed

    screen = Screen(json, quiet)
    rows: list[SpeedRow] = []

    def show(row: "SpeedRow") -> None:
        rows.append(row)
        screen.console.print(speed_line(row), markup=False, highlight=False, soft_wrap=True)
        if out is not None:
            write_speed(out, rows, {})

    with screen.observer() as observer, api.printing(print_after or (), observer):
        benched = api.bench(
            folder,
            dense=dense,
            batches=tuple(batch or ()),
            prompts=tuple(prompt or ()),
            pasts=tuple(past or ()),
            modes=("eager", "compiled") if mode == "both" else (mode,),
            alignments=tuple(align or ()),
            eval_data=eval_data or None,
            eval_windows=eval_windows,
            device=device,
            trust_remote_code=trust_remote_code,
            runtime=runtime,
            on_row=show,
        )
    if out is not None:
        write_speed(out, benched.rows, benched.facts)
    screen.print_json(speed_plain(benched.rows, benched.facts))
    screen.print_text(speed_markdown(benched.rows, benched.facts))
