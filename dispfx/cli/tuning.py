"""The verb that trains a pruned decoder: finetune."""

from typing import Annotated, Any

import typer

from dispfx.cli import options as given
from dispfx.cli.faults import reports_faults
from dispfx.cli.making import command_line, reading_options
from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.preconditions import check_folder
from dispfx.text_origin import check_texts


@reports_faults
def finetune(
    folder: given.Folder,
    data: Annotated[list[str], typer.Option(help="Text to learn from, as for `compile`.")],
    out: given.Out,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a whole folder with tuned weights, instead of adapters.")
    ] = False,
    eval_data: given.EvalData = None,
    eval_windows: given.EvalWindows = None,
    data_field: given.DataField = None,
    data_bytes: given.DataBytes = None,
    bos: given.Bos = "auto",
    allow_unknown: given.AllowUnknown = False,
    rank: Annotated[int | None, typer.Option(help="Of each adapter (16).")] = None,
    alpha: Annotated[float | None, typer.Option(help="Adapters are scaled by alpha / rank (32).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, falling to zero (2e-4).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training (1000).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences a step (8).")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a sequence (512, or what the decoder can read).")
    ] = None,
    seed: given.Seed = None,
    dtype: Annotated[
        given.DtypeName | None,
        typer.Option(help="Type of the frozen weights while adapters are trained; the folder's by default."),
    ] = None,
    device: given.Device = None,
    save_every: given.SaveEvery = None,
    resume: given.Resume = False,
    trust_remote_code: given.TrustRemoteCode = False,
    json: given.Json = False,
    quiet: given.Quiet = False,
    debug: given.Debug = False,
) -> None:
    """Train LoRA adapters on a pruned decoder, to recover what pruning has cost."""
    check_folder(folder)
    check_texts(data)
    check_texts(eval_data or [])
    if not resume:
        refuse_existing(out)
    from dispfx import api
    from dispfx.report import to_plain
    from dispfx.report.tuning import tuning_lines

    chosen: dict[str, Any] = dict(
        rank=rank, alpha=alpha, lr=lr, steps=steps, batch_size=batch_size, seq_len=seq_len, seed=seed
    )
    settings = api.tune_settings(
        folder,
        trust_remote_code=trust_remote_code,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    screen = Screen(json, quiet)
    with screen.observer() as observer:
        told = api.finetune(
            folder,
            data=data,
            **reading_options(data_field, data_bytes),
            bos=bos,
            allow_unknown=allow_unknown,
            out=out,
            merge=merge,
            settings=settings,
            eval_data=eval_data,
            eval_windows=eval_windows,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            observer=observer,
            command=command_line(),
            resume=resume,
            save_every=save_every,
        )
    screen.print_json({"out": str(out), "merged": merge, **to_plain(told)})
    for line in tuning_lines(told):
        screen.print_text(line)
    screen.print_text(f"written: {out}")
