"""Which decoder a measurement is of, and whether its results may be written into a folder."""

from pathlib import Path

from dispfx.deploy.digests import identity_of
from dispfx.errors import OutputError
from dispfx.report import load_report
from dispfx.run.folders import is_output
from dispfx.words.option_names import option


def measured_decoder(model: object, out: Path) -> str | None:
    """Return what identifies the decoder to measure; call this before measuring.

    Args:
        model: MODEL, or an output folder.
        out: the folder for the results.

    Returns:
        A digest that also identifies copies of an output folder; None for other decoders.

    Raises:
        OutputError: if `out` is the output folder of another decoder, which would show them as its own.
    """
    measured = _identity(Path(model).expanduser()) if isinstance(model, str | Path) else None
    if is_output(out) and _identity(out) != measured:
        raise OutputError(
            "the results would go into the folder of another decoder, which would show them as its own",
            where=str(out),
            hint=f"name the measured folder, or a new one, with {option('out')}",
        )
    return measured


def _identity(folder: Path) -> str | None:
    if not is_output(folder):
        return None
    path = folder / "report.json"
    return identity_of(folder, load_report(path).files if path.is_file() else ())
