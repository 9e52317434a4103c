"""Check an output folder: files and figures against the report, and forms against each other."""

import math
from functools import partial
from pathlib import Path

from dispfx.deploy import exported
from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.digests import changed, stored_size
from dispfx.errors import VerificationError
from dispfx.huggingface.model_loading import load_model
from dispfx.plan.plan import Plan
from dispfx.report import Report, load_report
from dispfx.run.folders import Opened, open_folder, require_record
from dispfx.run.onnx_folder import folder_onnx_lines, has_onnx
from dispfx.run.quantized_checkpoint import quantized_checkpoint_lines
from dispfx.run.quantized_onnx import quantized_onnx_lines
from dispfx.run.quantized_record import recorded_files
from dispfx.run.targets import DENSE_FOLDER
from dispfx.verification.equivalence import (
    OF_REPORT,
    ModuleDecoder,
    Verification,
    compare_decoders,
    shapes_up_to,
)
from dispfx.verification.graphs import exported_lines, tolerance_of
from dispfx.words.preconditions import is_saved_again


def verify(folder: str | Path, *, trust_remote_code: bool = False) -> list[Verification]:
    """Compare a folder's files with the digests in its report, and every form with the checkpoint.

    Sizes and the removed share are counted again.  A file, figure or form that differs gives a failing line,
    not an error.  A folder that transformers saved has no report, so only its forms are compared.

    Args:
        trust_remote_code: whether code that comes with the folder may run.

    Raises:
        OutputError, DataError, PlanMismatchError: if the folder is incomplete, or report and plan differ.
    """
    opened = open_folder(folder, trust_remote_code=trust_remote_code)
    if is_saved_again(opened.path):
        return _form_lines(opened, shapes_up_to(), trust_remote_code)
    require_record(opened.path)
    lines = _file_lines(opened.path)
    try:
        shapes = _shapes(load_report(opened.path / "report.json"))
        return lines + _form_lines(opened, shapes, trust_remote_code)
    except VerificationError:
        # Forms of other files than those of the report may be too different to be compared.
        if all(line.holds for line in lines):
            raise
        return lines


def _form_lines(
    opened: Opened, shapes: tuple[tuple[int, int], ...], trust_remote_code: bool
) -> list[Verification]:
    """Compare every form in a folder with the checkpoint."""
    lines: list[Verification] = []
    compared = partial(compare_decoders, vocabulary_size=opened.known_tokens, shapes=shapes)
    if opened.program is not None:
        tolerance = tolerance_of(opened.program)
        lines += compared("gather-add = checkpoint", opened.decoder, opened.fast(), tolerance)
        if (opened.path / exported.PROGRAM_FILE).is_file():
            lines += exported_lines(opened.path, opened.decoder, opened.known_tokens, shapes)
        if (opened.path / DENSE_FOLDER).is_dir():
            ordinary = load_model(opened.path / DENSE_FOLDER, trust_remote_code=trust_remote_code)
            own, dense = ModuleDecoder(opened.decoder), ModuleDecoder(ordinary)
            lines += compared("dense = checkpoint", own, dense, tolerance)
    if has_onnx(opened.path):
        lines += folder_onnx_lines(opened, shapes)
    return lines + quantized_onnx_lines(opened, shapes) + quantized_checkpoint_lines(opened)


def _shapes(report: Report) -> tuple[tuple[int, int], ...]:
    """Return the shapes of every comparison, and the longest sequence that the compile compared."""
    longest = max((line.shape[1] for line in report.verify if len(line.shape) == 2), default=0)
    # The report includes the usual shapes, unless the decoder reads fewer tokens.
    return shapes_up_to(longest or None, longest)


def _file_lines(folder: Path) -> list[Verification]:
    """Return one line if everything matches the report, or one line per file and figure that differs."""
    report = load_report(folder / "report.json")
    other = changed(folder, recorded_files(report))
    if not other and report.files:
        other = _other_figures(folder, report)
    if other or not report.files:
        return [Verification(f"{name}{OF_REPORT}", (), math.inf, math.inf, 0.0) for name in other]
    return [Verification(f"files{OF_REPORT}", (), 0.0, 0.0, 0.0)]


def _other_figures(folder: Path, report: Report) -> list[str]:
    """Return the figures of the report that differ from those of the folder's plan and weights."""
    parameters, size = stored_size(folder)
    counted = {
        "ratio.achieved": Plan.load(folder / PLAN_FILE).achieved,
        "parameters.pruned": parameters,
        "bytes.pruned": size,
    }
    reported = (report.ratio.achieved, report.parameters.pruned, report.bytes.pruned)
    return [name for name, figure in zip(counted, reported, strict=True) if counted[name] != figure]
