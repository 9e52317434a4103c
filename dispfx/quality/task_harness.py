"""Zero-shot and few-shot tasks, measured by lm-eval, the language model evaluation harness.

The paper reports one metric for each of five tasks: accuracy for WinoGrande, and for the other four the
accuracy of the choice with the greatest likelihood per byte (`acc_norm`).

lm-eval reads its data from the hub, or from files that a custom task names.  Task files can run code: their
templates, and the functions that they name.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from dispfx.errors import DataError
from dispfx.words.choices import closest
from dispfx.words.extras import library
from dispfx.words.option_names import option

PAPER_METRICS: Mapping[str, str] = {
    "piqa": "acc_norm",
    "winogrande": "acc",
    "hellaswag": "acc_norm",
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
}
_FIRST_CHOICE = "acc_norm"
# Only for figures that are not means; the standard error of a mean has a formula.
_BOOTSTRAPS = 100
# The default of lm-eval's own command.
_SHOTS_SEED = 1234
_PACKAGES = ("lm-eval", "datasets", "transformers", "torch")


@dataclass(frozen=True)
class TaskScore:
    """The score of one decoder in one task.

    Args:
        task: name in lm-eval.
        metric: the paper's for its tasks; otherwise acc_norm if available, or the first.
        value: of that metric.
        error: its standard error, or None.
        metrics: all metrics of the task, by name.
        samples: number of evaluated questions.
        of: number of all questions.
        shots: answered examples before each question.
        version: of the task's file.
    """

    task: str
    metric: str
    value: float
    error: float | None
    metrics: Mapping[str, float]
    samples: int
    of: int
    shots: int
    version: str


@dataclass(frozen=True)
class TaskScores:
    """The scores of one decoder in several tasks.

    Args:
        scores: in the requested order.
        context: maximum number of tokens that the decoder read.
        batch_size: questions a forward pass.
        limit: maximum number of questions per task; None for all.
        versions: of the libraries used.
    """

    scores: tuple[TaskScore, ...]
    context: int
    batch_size: int
    limit: int | None
    versions: Mapping[str, str]

    @property
    def average(self) -> float | None:
        """The mean over the paper's five tasks, each by its own metric; None unless all five are there."""
        values = [one.value for one in self.scores if PAPER_METRICS.get(one.task) == one.metric]
        return sum(values) / len(values) if len(values) == len(PAPER_METRICS) else None


def harness_versions() -> dict[str, str]:
    """Return the versions of the libraries that affect a score."""
    return {name: metadata.version(name) for name in _PACKAGES}


class Harness:
    """Tasks by name, checked before a decoder is opened.

    Args:
        names: of tasks, groups or tags, in the order to be measured; a group stands for its tasks.
        folder: with custom task files (YAML), which take precedence over lm-eval's.
        shots: answered examples before each question; by default those of the task, or none.
        limit: number of questions per task, from the start.

    Raises:
        DataError: if lm-eval is not installed, a task is unknown, or its data cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path | None = None,
        *,
        shots: int | None = None,
        limit: int | None = None,
    ):
        self._evaluator = _module("lm_eval.evaluator")
        self._wrapper = _module("lm_eval.models.huggingface")
        self._shots, self._limit = shots, limit
        self._manager = _manager(names, folder)
        self.tasks = tuple(dict.fromkeys(task for name in names for task in self._leaves(name)))

    def score(
        self,
        model: nn.Module,
        tokenizer: Any,
        task: str,
        *,
        context: int,
        batch_size: int = 1,
        special_tokens: bool = True,
    ) -> TaskScore:
        """Return the score of a decoder in one of `tasks`.

        Args:
            model: a transformers decoder.
            context: maximum number of tokens per question; longer questions are cut at the start.
            batch_size: questions per forward pass.
            special_tokens: whether questions begin with the special tokens that the tokenizer adds.
        """
        with _silent():
            decoder = self._wrapper.HFLM(
                pretrained=model,
                backend="causal",
                tokenizer=tokenizer,
                max_length=context,
                batch_size=batch_size,
                # None: as the tokenizer does.
                add_bos_token=None if special_tokens else False,
            )
            # simple_evaluate would also run git, and inspect the machine.
            found = self._evaluator.evaluate(
                decoder,
                {"tasks": {task: self._ready(task)}},
                limit=self._limit,
                bootstrap_iters=_BOOTSTRAPS,
                log_samples=False,
            )
        return _score(task, found)

    def _leaves(self, name: str) -> list[str]:
        """Return the tasks of a name, after checking that they can be read."""
        if name not in self._manager.all_tasks:
            others = f"`lm_eval ls tasks` lists them; {option('task_folder')} adds your own"
            hint = closest(name, self._manager.all_tasks) or others
            raise DataError(f"lm-eval has no task {name!r}", hint=hint)
        loaded = self._loaded(name)
        for task in loaded.values():
            self._require_readable(task)
        return list(loaded)

    def _ready(self, name: str) -> Any:
        """Return a task that has not been measured yet, with its shots and their seed."""
        return self._prepared(self._loaded(name)[name])

    def _prepared(self, task: Any) -> Any:
        shots = task.get_config("num_fewshot") if self._shots is None else self._shots
        task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=_SHOTS_SEED)
        return task

    def _loaded(self, name: str) -> dict[str, Any]:
        try:
            with _silent():
                return self._manager.load([name])["tasks"]
        except Exception as error:
            # Hub, data sets and task files may raise anything; report it as an error of the task.
            raise _fault(name, error) from error

    def _require_readable(self, task: Any) -> None:
        try:
            with _silent():
                self._prepared(task).build_all_requests(limit=1, rank=0, world_size=1)
        except Exception as error:
            raise _fault(task.config.task, error) from error


def _fault(task: str, error: Exception) -> DataError:
    hint = "check its templates, the names of its columns, and the source of its examples"
    if isinstance(error, OSError):
        hint = (
            "data comes from the hub; without a network, write a task on local files and name its folder "
            f"with {option('task_folder')}"
        )
    return DataError(f"the task {task} gives no questions: {_short(error)}", hint=hint)


def _score(task: str, found: Mapping[str, Any]) -> TaskScore:
    values, errors = {}, {}
    for key, value in found["results"][task].items():
        name, comma, kind = key.partition(",")
        if not comma or isinstance(value, str):
            continue
        # Metrics of other filters are separate figures.
        name = name if kind == "none" else f"{name} ({kind})"
        if "_stderr" in name:
            errors[name.replace("_stderr", "")] = float(value)
        else:
            values[name] = float(value)
    if not values:
        raise DataError("this task measures nothing", where=task)
    metric = PAPER_METRICS.get(task, _FIRST_CHOICE)
    metric = metric if metric in values else next(iter(values))
    samples = found["n-samples"][task]
    return TaskScore(
        task=task,
        metric=metric,
        value=values[metric],
        error=errors.get(metric),
        metrics=values,
        samples=samples["effective"],
        of=samples["original"],
        shots=found["n-shot"][task],
        version=str(found["versions"].get(task)),
    )


def _manager(names: Sequence[str], folder: Path | None) -> Any:
    """Return the task manager; lm-eval's own index is read only if one of its tasks is requested."""
    managers = _module("lm_eval.tasks").TaskManager
    with _silent():
        if folder is None:
            return managers()
        own = managers(include_path=str(folder), include_defaults=False)
        known = all(name in own.all_tasks for name in names)
        return own if known else managers(include_path=str(folder))


def _module(name: str) -> Any:
    with _silent():
        return library(name, "lm-eval", "tasks are measured by lm-eval, which")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hide the warnings, log lines, output and progress bars of lm-eval."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        # Its bars ignore all settings, and it prints.
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _short(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
