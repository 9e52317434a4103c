"""The results of `dispfx eval`: in a terminal, as JSON, and as eval.json and eval.md in a folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispfx.errors import DataError
from dispfx.files.disk import replacing, writing
from dispfx.files.json_text import read_json
from dispfx.quality.agreement import Agreement
from dispfx.quality.perplexity import Perplexity
from dispfx.quality.task_harness import TaskScores
from dispfx.report.json_form import from_plain, to_plain
from dispfx.report.numbers import shown_perplexity
from dispfx.report.task_rows import COMPARED_HEADER, HEADER, task_notes, task_rows, tasks_plain

EVALUATION_FILE = "eval.json"
_PAGE_FILE = "eval.md"


@dataclass(frozen=True)
class Evaluation:
    """One run of `dispfx eval`.

    Args:
        model: MODEL, as the user wrote it.
        dense_model: the decoder that it was compared with, or None.
        perplexity, tasks: of the decoder, if requested.
        agreement: with the dense decoder, on the text.
        dense_tasks: the scores of the dense decoder.
        decoder: identity of the measured decoder, as `dispfx.deploy.digests.identity`; None for a decoder
            that is in no output folder.
    """

    model: str
    dense_model: str | None = None
    perplexity: Perplexity | None = None
    agreement: Agreement | None = None
    tasks: TaskScores | None = None
    dense_tasks: TaskScores | None = None
    decoder: str | None = None


def text_lines(found: Evaluation) -> list[str]:
    """Return the results on a text, as sentences."""
    if found.perplexity is None:
        return []
    protocol = found.perplexity.protocol
    lines = [
        f"perplexity {shown_perplexity(found.perplexity.value)}  ({protocol['windows']} windows of "
        f"{protocol['context']} tokens, {protocol['tokens']:,} predicted)"
    ]
    if protocol.get("bos"):
        lines.append(f"every window begins with token {' '.join(map(str, protocol['bos']))}, not predicted")
    alike = found.agreement
    if alike is not None:
        lines.append(
            f"compared with the dense decoder: KL {alike.kl_nats:.4f} nats, the same likeliest token at "
            f"{alike.top1:.1%} of {alike.tokens:,} positions"
        )
    return lines


def task_table(found: Evaluation) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return header and rows of the tasks that were measured."""
    assert found.tasks is not None
    header = HEADER if found.dense_tasks is None else COMPARED_HEADER
    return header, task_rows(found.tasks, found.dense_tasks)


def evaluation_plain(found: Evaluation) -> dict[str, Any]:
    """Return all figures, ready for JSON; what was not measured is left out."""
    plain: dict[str, Any] = {"model": found.model, "dense_model": found.dense_model}
    if found.decoder is not None:
        plain["decoder"] = found.decoder
    if found.perplexity is not None:
        plain |= {"perplexity": found.perplexity.value, "protocol": found.perplexity.protocol}
    if found.agreement is not None:
        plain["agreement"] = found.agreement
    if found.tasks is not None:
        plain["tasks"] = tasks_plain(found.tasks)
    if found.dense_tasks is not None:
        plain["dense_tasks"] = tasks_plain(found.dense_tasks)
    return to_plain(plain)


def write_evaluation(found: Evaluation, folder: Path) -> list[Path]:
    """Write eval.json and eval.md atomically, and return their paths.

    Raises:
        OutputError: if the folder cannot be written.
    """
    texts: Mapping[str, str] = {
        EVALUATION_FILE: json.dumps(evaluation_plain(found), indent=1, ensure_ascii=False) + "\n",
        _PAGE_FILE: _markdown(found),
    }
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def read_evaluation(path: Path) -> Evaluation | None:
    """Read eval.json; None if the file is missing.

    Raises:
        DataError: if it is not an evaluation.
    """
    if not path.is_file():
        return None
    try:
        plain = read_json(path)
    except (ValueError, RecursionError) as error:
        raise DataError(f"this file is not an evaluation: {error}", where=str(path)) from error
    if not isinstance(plain, dict):
        raise DataError("this file is not an evaluation: a JSON object was expected", where=str(path))
    if "perplexity" in plain:
        plain |= {"perplexity": {"value": plain["perplexity"], "protocol": plain.get("protocol")}}
    return from_plain(Evaluation, plain, str(path))


def _markdown(found: Evaluation) -> str:
    dense = "" if found.dense_model is None else f" compared with `{found.dense_model}`"
    lines = [f"`{found.model}`{dense}", "", *(f"- {line}" for line in text_lines(found))]
    if found.tasks is not None:
        header, rows = task_table(found)
        table = [header, ["---"] * len(header), *rows]
        lines += [*(f"- {note}" for note in task_notes(found.tasks)), ""]
        lines += [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join(lines) + "\n"
