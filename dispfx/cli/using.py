"""Verbs that inspect a decoder or use a folder: inspect, verify, export, generate, sample."""

from pathlib import Path
from typing import Any

from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import OutputError, VerificationError
from dispfx.settings.trees import (
    ExportSettings,
    GenerateSettings,
    InspectSettings,
    SampleSettings,
    VerifySettings,
)
from dispfx.words.model_origin import is_plan_file, origin_of
from dispfx.words.preconditions import check_folder, is_saved_again
from dispfx.words.text_origin import check_texts


def inspect(settings: InspectSettings, screen: Screen) -> None:
    """Show what can be pruned, what stays dense and why, and what learning would take.

    For a plan.safetensors, show what it keeps.
    """
    model = settings.model.model
    if _is_plan(model):
        _show_plan(model, screen)
        return
    origin_of(model)
    from dispfx import api
    from dispfx.report.estimate import estimate_plain, print_estimate
    from dispfx.report.site_tables import coverage_lines, coverage_plain, print_sites, program_plain

    with screen.observer():
        program = api.inspect(settings, config_only=settings.inspection.config_only)
        needed = api.estimate(program, api.settings_of(program, settings.learning))
    reached = api.coverage(program)
    screen.print_json(
        {**program_plain(program), **coverage_plain(reached), "estimate": estimate_plain(needed)}
    )
    if not screen.json:
        print_sites(program, screen.console)
        for line in coverage_lines(reached):
            screen.console.print(line, highlight=False, markup=False, soft_wrap=True)
        print_estimate(needed, screen.console)


def _is_plan(word: str) -> bool:
    """Whether the argument names a plan file; MODEL is never a .safetensors file."""
    path = Path(word).expanduser()
    return (path.suffix.lower() == ".safetensors" and path.is_file()) or is_plan_file(path)


def _show_plan(word: str, screen: Screen) -> None:
    from dispfx.plan.family import Family, stored_plans
    from dispfx.report.plans import family_lines, family_plain, plan_lines, plan_plain, plan_rows
    from dispfx.report.table import print_rows

    found = stored_plans(Path(word).expanduser())
    if isinstance(found, Family):
        plan, plain, lines = found.plan, family_plain(found), family_lines(found)
    else:
        plan, plain, lines = found, plan_plain(found), plan_lines(found)
    screen.print_json(plain)
    for line in lines:
        screen.print_text(line)
    if not screen.json:
        print_rows([plan_rows(plan)], screen.console, ("selection", "kept", "share", "widths"))


def verify(settings: VerifySettings, screen: Screen) -> None:
    """Check a folder: its files, plan and sizes, and the agreement of all its forms of the decoder."""
    folder = settings.folder
    check_folder(folder.folder)
    from dispfx import api
    from dispfx.report import to_plain
    from dispfx.report.table import print_verifications
    from dispfx.verification.equivalence import require

    with screen.observer():
        verifications = api.verify(folder.folder, trust_remote_code=folder.trust_remote_code)
    document = {"verify": to_plain(verifications)}
    if not verifications:
        screen.print_text("the folder holds one form of the decoder, so there is nothing to compare it with")
    elif not screen.json:
        print_verifications(verifications, screen.console)
    if is_saved_again(folder.folder):
        screen.print_text("transformers wrote this folder; it has no report to compare its files with")
    try:
        require(*verifications)
    except VerificationError as error:
        error.document = document
        raise
    screen.print_json(document)


def export(settings: ExportSettings, screen: Screen) -> None:
    """Write other forms of the decoder in a folder, and verify them."""
    forms = settings.forms
    if not (forms.onnx or forms.pt2 or forms.quantize != "none"):
        raise OutputError("there is nothing to write", hint="add --onnx, --pt2, --quantize, or several")
    check_folder(settings.model.model)
    from dispfx import api

    with screen.observer() as observer:
        files = api.export(settings, observer=observer)
    form = "onnx" if forms.onnx else "checkpoint"
    recorded = _quantized(Path(settings.model.model).expanduser(), forms.quantize, form)
    screen.print_json({"files": [str(path) for path in files], **recorded})
    for path in files:
        screen.print_text(str(path))


def _quantized(folder: Path, scheme: str, form: str) -> dict[str, Any]:
    """Return what the folder's report says of a quantized model, ready for JSON."""
    from dispfx.report import load_report, to_plain

    path = folder / "report.json"
    if scheme == "none" or not path.is_file():
        return {}
    found = load_report(path).quantized
    return {"quantized": to_plain([one for one in found if (one.name, one.form) == (scheme, form)])}


def generate(settings: GenerateSettings, screen: Screen) -> None:
    """Continue a text."""
    origin_of(settings.model.model)
    if settings.generation.runtime == "onnx":
        check_folder(settings.model.model)
    from dispfx import api

    with screen.observer():
        text = api.generate(settings)
    screen.print_json({"prompt": settings.generation.prompt, "text": text})
    screen.print_text(text)


def sample(settings: SampleSettings, screen: Screen) -> None:
    """Let a decoder write text, as a token file to learn from."""
    origin_of(settings.model.model)
    check_texts(settings.text.data or [], settings.text.data_weight)
    refuse_existing(settings.sampling.path)
    from dispfx import api

    with screen.observer() as observer:
        path = api.sample(settings, observer=observer)
    screen.print_json({"tokens": settings.sampling.tokens, "file": str(path)})
    screen.print_text(f"{path}: {settings.sampling.tokens:,} tokens; learn from them with --data {path}")
