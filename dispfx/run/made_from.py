"""What a run makes its output from, as digests: an output says it, and a resumed run compares it.

Names say little of it: a file or a folder may hold something else by now, and a module in memory has no name.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dispfx.deploy.digests import identity_of
from dispfx.errors import OutputError
from dispfx.ir.content_digest import content_digest, program_digest
from dispfx.ir.program import Program
from dispfx.learning.state import settings_identity
from dispfx.plan.plan import Plan
from dispfx.run.decoder_files import write_files
from dispfx.run.readiness import Ready
from dispfx.run.recovery_job import Recovery
from dispfx.run.run_text import Text
from dispfx.settings import RunSettings
from dispfx.source import Source
from dispfx.source.own_code import private_code
from dispfx.words.option_names import option

MEASURED = "text to measure on"


def made_from(source: Source, program: Program, text: Text) -> dict[str, str]:
    """Return the digests of what a run works on, each by what a message calls it.

    Args:
        source: of the dense decoder.
        program: of it.
    """
    learned = (*text.learn, repr((text.weights, text.bos, text.separator)))
    measured = (part for one in text.measured for part in (one.tokens, repr(one.about.bos)))
    return {
        "decoder": program_digest(program),
        "dtype": str(program.dtype),
        "config, tokenizer or code": _files_digest(source),
        "text to learn from": content_digest(learned),
        MEASURED: content_digest(measured),
    }


def made_by(settings: RunSettings, ready: Ready) -> dict[str, str]:
    """Return the digests of what a plan is learned from, that of the settings among them."""
    # What is fitted to the device depends on where a run works.
    fitted = settings.learning.adaptable
    chosen = {name: one for name, one in settings_identity(ready.settings).items() if name not in fitted}
    budget = {**ready.budget.recorded.plain, "align": settings.budget.align}
    sites = [[site.name, site.size] for site in ready.learned_on.sites]
    if ready.knots is not None:
        budget |= asdict(ready.knots)
    recovery = [settings.afterwards.recover, settings.afterwards.recover_steps]
    return {
        **made_from(ready.source, ready.program, ready.text),
        "choice of settings": settings_digest(chosen, budget, sites, recovery),
    }


def made_by_recovery(job: Recovery) -> dict[str, str]:
    """Return the digests of what a recovery trains, and how."""
    return {
        **made_from(job.dense, job.program, job.text),
        "pruned decoder": str(identity_of(job.folder)),
        "choice of settings": settings_digest(
            job.settings.identity, job.context, job.windows, job.merge, job.dtype
        ),
    }


def is_made_of_the_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans keep the same features of one decoder, learned in one way, whatever is measured."""
    ours, theirs = ({**one.made_from, MEASURED: ""} for one in (plan, other))
    return (plan.digest, ours) == (other.digest, theirs)


def settings_digest(*settings: Any) -> str:
    """Return the digest of what JSON can hold."""
    return content_digest([json.dumps(settings, sort_keys=True, default=str)])


def require_made_from(path: Path, made: Mapping[str, str], asked: Mapping[str, str]) -> None:
    """Raise if a complete output was made from something else.

    Raises:
        OutputError: with what differs.
    """
    others = [name for name, digest in asked.items() if made.get(name) != digest]
    if others:
        raise OutputError(
            f"the output is complete and was made from another {' and another '.join(others)}"
            if made
            else "the output is complete, and does not say what it was made from",
            where=str(path),
            hint=f"name another output with {option('out')}",
        )


def _files_digest(source: Source) -> str:
    """Return the digest of the decoder's files but its weights, as an output folder gets them."""
    with tempfile.TemporaryDirectory(prefix="dispfx-") as name, private_code(Path(name)):
        folder = Path(name)
        write_files(source, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return content_digest(part for path in files for part in (path.name, path.read_bytes()))
