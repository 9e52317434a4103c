"""Tasks of lm-eval on a decoder: dense, or pruned from an output folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dispfx.api.folders import is_output, open_folder
from dispfx.api.opening import Opening, context_of, longest_context
from dispfx.errors import DataError
from dispfx.measure.tasks import Harness, TaskScores, harness_versions
from dispfx.report import NullObserver, Observer
from dispfx.report.tasks import task_line
from dispfx.source.text import tokens_in_front
from dispfx.text_origin import Bos


def score_tasks(
    model: str | nn.Module,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    context: int | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    bos: Bos = "auto",
    observer: Observer | None = None,
) -> TaskScores:
    """Measure a decoder in tasks.

    Args:
        model: MODEL, an output folder, or a transformers model.
        tasks: lm-eval's names of tasks or groups.
        folder: with task files of one's own; they are programs, like a module of one's own.
        shots, limit: as for `dispfx.measure.tasks.Harness`.
        context: tokens that the decoder reads at most; 2048 by default, or what it can read.
        bos: whether a question begins with the beginning-of-sequence token; the tokenizer has to add it.

    Raises:
        DataError: if lm-eval is missing, a task is unknown, its data cannot be had, or the decoder has no
            tokenizer or is unknown to transformers.
    """
    watcher = observer or NullObserver()
    if isinstance(model, str) and is_output(model) and open_folder(model).plan is None:
        # Said before data is fetched.
        raise _unknown(model)
    watcher.stage("read tasks")
    harness = Harness(tasks, None if folder is None else Path(folder), shots=shots, limit=limit)
    watcher.stage("open")
    opening = Opening(model, revision, dtype, device, trust_remote_code, tokenizer)
    decoder, words, longest = _decoder(opening)
    context = context or longest
    if bos == "on" and not tokens_in_front(words):
        raise DataError(
            "lm-eval leaves it to the tokenizer to add a beginning-of-sequence token, and this one adds none",
            hint="leave out --bos on, or measure on a text with --eval-data",
        )
    scores = []
    for task in harness.tasks:
        watcher.stage(task)
        scores.append(
            harness.score(
                decoder, words, task, context=context, batch_size=batch_size, special_tokens=bos != "off"
            )
        )
        watcher.note(task_line(scores[-1]))
    return TaskScores(tuple(scores), context, batch_size, limit, harness_versions())


def _decoder(opening: Opening) -> tuple[nn.Module, Any, int]:
    """Return a transformers model, its tokenizer, and how many tokens it reads."""
    if isinstance(opening.model, str) and is_output(opening.model):
        opened = open_folder(
            opening.model, device=opening.device or "cpu", trust_remote_code=opening.trust_remote_code
        )
        model, config, words = opened.decoder, opened.config, opened.tokenizer
        name, longest = opening.model, longest_context(config)
    else:
        source = opening.open()
        model, config, words = source.model, source.config, source.tokenizer
        name, longest = source.name, context_of(source)
    if config is None or not hasattr(model, "config"):
        raise _unknown(name)
    if words is None:
        raise DataError(
            "tasks are text, which needs a tokenizer", where=name, hint="name one with --tokenizer"
        )
    return model, words, longest


def _unknown(name: str) -> DataError:
    return DataError(
        "tasks need a decoder that transformers knows, and this one is a module or a graph of its own",
        where=name,
    )
