"""Tasks of lm-eval on a decoder: dense, or pruned from an output folder."""

from typing import Any

from torch import nn

from dispfx.errors import DataError
from dispfx.quality.task_harness import Harness, TaskScores, harness_versions
from dispfx.report import NullObserver, Observer
from dispfx.report.task_rows import task_line
from dispfx.run.folders import is_output, open_folder
from dispfx.run.opening import open_model, open_output
from dispfx.settings import ModelSettings
from dispfx.settings.trees import EvalSettings
from dispfx.source.source import beyond_context, context_of, longest_context
from dispfx.source.text import tokens_in_front
from dispfx.words.option_names import option


def score_tasks(model: Any, *, observer: Observer | None = None, **changes: Any) -> TaskScores:
    """Measure a decoder in tasks of lm-eval.

    Args:
        model: MODEL, an output folder, a transformers model, or `EvalSettings`.
        changes: single settings, as in `tasks=["piqa"], limit=100`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        DataError: if lm-eval is missing, a task is unknown, its data cannot be fetched, or the decoder has no
            tokenizer or is unknown to transformers.
    """
    settings = EvalSettings.given(model, changes)
    model, asked, bos = settings.model.model, settings.evaluation, settings.text.bos
    watcher = observer or NullObserver()
    if isinstance(model, str) and is_output(model) and open_folder(model).plan is None:
        # Checked before data is fetched.
        raise _unknown(model)
    watcher.stage("read tasks")
    harness = Harness(asked.task_names, asked.task_folder, shots=asked.shots, limit=asked.limit)
    watcher.stage("open")
    decoder, words, longest = _decoder(settings.model, of_dense=asked.dense is not None)
    context = asked.context or longest
    for note in beyond_context(getattr(decoder, "config", None), context):
        watcher.note(note)
    if bos == "on" and not tokens_in_front(words):
        raise DataError(
            "with lm-eval the tokenizer adds the beginning-of-sequence token, but this tokenizer adds none",
            hint=f"leave out {option('bos', 'on')}, or measure on a text with {option('eval_data')}",
        )
    scores = []
    for task in harness.tasks:
        watcher.stage(task)
        scores.append(
            harness.score(
                decoder,
                words,
                task,
                context=context,
                batch_size=asked.batch_size,
                special_tokens=bos != "off",
            )
        )
        watcher.note(task_line(scores[-1]))
    return TaskScores(tuple(scores), context, asked.batch_size, asked.limit, harness_versions())


def _decoder(settings: ModelSettings, *, of_dense: bool) -> tuple[nn.Module, Any, int]:
    """Return a transformers model, its tokenizer, and how many tokens it reads."""
    if isinstance(settings.model, str) and is_output(settings.model):
        opened = open_output(settings, of_dense=of_dense)
        model, config, words = opened.decoder, opened.config, opened.tokenizer
        name, longest = settings.model, longest_context(config)
    else:
        source = open_model(settings)
        model, config, words = source.model, source.config, source.tokenizer
        name, longest = source.name, context_of(source)
    if config is None or not hasattr(model, "config"):
        raise _unknown(name)
    if words is None:
        raise DataError(
            "tasks need a tokenizer, but this decoder has none",
            where=name,
            hint=f"name one with {option('tokenizer')}",
        )
    return model, words, longest


def _unknown(name: str) -> DataError:
    return DataError(
        "tasks need a decoder that transformers knows, but this one is a custom module or a graph",
        where=name,
    )
