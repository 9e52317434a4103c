"""Verbs that look at a decoder or use a folder: inspect, verify, export, generate."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.screen import Screen
from dispfx.errors import OutputError, VerificationError
from dispfx.origin import origin_of
from dispfx.preconditions import check_folder, is_saved_again


@reports_faults
def inspect(
    model: given.Model,
    config_only: given.ConfigOnly = False,
    skip: given.Skip = None,
    select: given.Select = "after-norm",
    steps: given.Steps = None,
    seq_len: given.SeqLen = None,
    batch_size: given.BatchSize = None,
    hypernetwork: given.Hypernetwork = None,
    revision: given.Revision = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    trust_remote_code: given.TrustRemoteCode = False,
    print_after: given.PrintAfter = None,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Show what can be pruned, what is left dense and why, and what learning would take.

    Of a plan.safetensors, show what it keeps.
    """
    chosen = {"steps": steps, "seq_len": seq_len, "batch_size": batch_size, "hypernetwork": hypernetwork}
    if _is_plan(model):
        _show_plan(model, Screen(json, quiet))
        return
    origin_of(model)
    from dispfx import api
    from dispfx.ir.coverage import coverage
    from dispfx.report.coverage import coverage_lines, coverage_plain
    from dispfx.report.estimate import estimate_plain, print_estimate
    from dispfx.report.sites import print_sites, program_plain

    settings = api.learn_settings(
        model, **{name: value for name, value in chosen.items() if value is not None}
    )
    screen = Screen(json, quiet)
    with screen.observer() as observer, api.printing(print_after or (), observer):
        program = api.inspect(
            model,
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            config_only=config_only,
            skip=tuple(skip or ()),
            select=select,
        )
        needed = api.estimate(program, api.settings_of(program, settings))
    reached = coverage(program)
    screen.print_json(
        {**program_plain(program), **coverage_plain(reached), "estimate": estimate_plain(needed)}
    )
    if not json:
        print_sites(program, screen.console)
        for line in coverage_lines(reached):
            screen.console.print(line, highlight=False, markup=False, soft_wrap=True)
        print_estimate(needed, screen.console)


def _is_plan(word: str) -> bool:
    """Whether the word names a file as plans have; MODEL is never a .safetensors file."""
    return word.endswith(".safetensors") and Path(word).expanduser().is_file()


def _show_plan(word: str, screen: Screen) -> None:
    from dispfx.ir.plan import Plan
    from dispfx.report.plans import plan_lines, plan_plain, plan_rows
    from dispfx.report.table import print_rows

    plan = Plan.load(Path(word).expanduser())
    screen.print_json(plan_plain(plan))
    for line in plan_lines(plan):
        screen.print_text(line)
    if not screen.json:
        print_rows([plan_rows(plan)], screen.console, ("selection", "kept", "share", "widths"))


@reports_faults
def verify(
    folder: given.Folder,
    print_after: given.PrintAfter = None,
    trust_remote_code: given.TrustRemoteCode = False,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Compare every form of the decoder in a folder, as written, and say how far they are apart."""
    check_folder(folder)
    from dispfx import api
    from dispfx.measure.equivalence import require
    from dispfx.report import to_plain
    from dispfx.report.table import print_verifications

    screen = Screen(json, quiet)
    with screen.observer() as observer, api.printing(print_after or (), observer):
        verifications = api.verify(folder, trust_remote_code=trust_remote_code)
    document = {"verify": to_plain(verifications)}
    if not verifications:
        screen.print_text("the folder holds one form of the decoder, so there is nothing to compare it with")
    elif not json:
        print_verifications(verifications, screen.console)
    if is_saved_again(folder):
        screen.print_text("transformers wrote this folder; it has no report to compare its files with")
    try:
        require(*verifications)
    except VerificationError as error:
        error.document = document
        raise
    screen.print_json(document)


@reports_faults
def export(
    folder: given.Folder,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write DIR/onnx/.")] = False,
    pt2: Annotated[bool, typer.Option("--pt2", help="Write DIR/program.pt2.")] = False,
    opset: Annotated[int | None, typer.Option(min=1, help="ONNX operator set (23).")] = None,
    write: Annotated[
        Literal["gather-add", "index-add"],
        typer.Option(help="How the ONNX model writes into the residual stream; the second is slow."),
    ] = "gather-add",
    ort_fusions: Annotated[
        bool, typer.Option("--ort-fusions", help="Use operators of ONNX Runtime's own where that holds.")
    ] = False,
    no_padding: Annotated[
        bool, typer.Option("--no-padding", help="For texts without padding only: attention needs no mask.")
    ] = False,
    print_after: given.PrintAfter = None,
    trust_remote_code: given.TrustRemoteCode = False,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Write other forms of the decoder in a folder beside its checkpoint, and verify them."""
    if not (onnx or pt2):
        raise OutputError("there is nothing to write", hint="say what: --onnx, --pt2, or both")
    check_folder(folder)
    from dispfx import api

    screen = Screen(json, quiet)
    with screen.observer() as observer, api.printing(print_after or (), observer):
        files = api.export(
            folder,
            onnx=onnx,
            pt2=pt2,
            opset=opset,
            write=write,
            ort_fusions=ort_fusions,
            padding=not no_padding,
            trust_remote_code=trust_remote_code,
            observer=observer,
        )
    screen.print_json({"files": [str(path) for path in files]})
    for path in files:
        screen.print_text(str(path))


@reports_faults
def generate(
    model: given.ModelOrFolder,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest tokens only.")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    runtime: Annotated[Literal["torch", "onnx"], typer.Option(help="What runs the decoder.")] = "torch",
    bos: given.Bos = "auto",
    trust_remote_code: given.TrustRemoteCode = False,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Continue a text."""
    origin_of(model)
    if runtime == "onnx":
        check_folder(Path(model))
    from dispfx import api

    screen = Screen(json, quiet)
    text = api.generate(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        runtime=runtime,
        bos=bos,
        trust_remote_code=trust_remote_code,
    )
    screen.print_json({"prompt": prompt, "text": text})
    screen.print_text(text)
