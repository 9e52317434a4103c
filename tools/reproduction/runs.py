"""Runs that the paper's tables are made of: each learned and measured once, and kept in a folder.

    OUT/facts.json                  what all runs share: decoder, texts, protocol
    OUT/runs/NAME/run.json          figures of one run
    OUT/runs/NAME/plan.safetensors  what it keeps
    OUT/runs/NAME/metrics.jsonl     its steps

A run that was cut off goes on from its state, and one that is complete is read back, so a table that was
cut off goes on with its next row, and tables share runs.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.api.compilation import apply
from dispfx.compiler.programs import capture, lower
from dispfx.demo.grammar import draw_lines
from dispfx.errors import DataError, DispfxError
from dispfx.files.disk import replacing
from dispfx.learning.records import METRICS_FILE, StepRecord
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.learning.trainer import Watch
from dispfx.plan.plan import Plan
from dispfx.quality.perplexity import measure
from dispfx.report.run import read_steps
from dispfx.run.fitting import fitted_settings
from dispfx.run.folder_report import device_name, versions
from dispfx.run.mask_learning import learn
from dispfx.run.run_text import Text, TextChoice, open_text, require_tokens
from dispfx.settings import ComputeSettings, TextSettings, learn_settings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source import Source, encode, load_source
from dispfx.source.source import context_of
from reproduction.setup import Common, Outcome, Setup

# Settings that differ between the runs of a folder, or only record which settings were chosen.
_OF_A_RUN = ("seed", "adaptable")
FACTS_FILE, RUN_FILE, PLAN_FILE = "facts.json", "run.json", "plan.safetensors"
# The demo's other text: two of its five skills, in lines of their own.
_OTHER_NAME = "lines of the demo's arithmetic and counting"
_OTHER_SKILLS, _OTHER_LINES, _OTHER_SEED = ("arithmetic", "counting"), 20_000, 2025


class Bench:
    """One decoder and its texts; learns and measures runs, or reads them back."""

    def __init__(self, common: Common, out: Path, seconds: float = math.inf):
        """Open the decoder and its texts.

        Raises:
            DispfxError: if one cannot be used, or the folder holds runs of something else.
        """
        self._ends = time.perf_counter() + seconds
        self.common, self.out = common, out
        self.source = load_source(common.model, device=common.device, dtype=common.dtype)
        self.program = capture(self.source.model)
        self.texts = _texts(self.source, common)
        for text in self.texts:
            require_tokens(self.source, text, self.program.vocabulary_size)
        self.context = common.context or context_of(self.source)
        self.failures: dict[str, str] = {}
        self.facts = self._facts()
        self.dense = Outcome(tuple(self.facts["dense"]), 0.0, _count(self.program.graph_module), 0, 0, None)

    @property
    def seconds_left(self) -> float:
        """Of the time that was given for all of it."""
        return self._ends - time.perf_counter()

    def settings(self, setup: Setup) -> LearnSettings:
        """Return the settings of a run: the recipe's, the tables' own, and the setup's."""
        chosen = {**self.common.settings, **dict(setup.changes)}
        settings = learn_settings(self.common.model, recipe=self.common.recipe, **chosen)
        return fitted_settings(settings, program=self.program)

    def run(self, setup: Setup) -> Outcome | None:
        """Return what a run gave; None where there is no time left for it, or it failed."""
        folder = self._folder(setup)
        if (folder / RUN_FILE).is_file():
            return _read_outcome(folder / RUN_FILE)
        if self.seconds_left <= 0 or setup.name in self.failures:
            return None
        try:
            outcome = self._learned(setup, folder)
        except (DispfxError, RuntimeError) as error:
            self.failures[setup.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        _write_json(folder / RUN_FILE, asdict(outcome))
        (folder / STATE_FILE).unlink(missing_ok=True)
        return outcome

    def plan(self, setup: Setup) -> Plan | None:
        """Return the plan of a run, as `run`."""
        return None if self.run(setup) is None else Plan.load(self._folder(setup) / PLAN_FILE)

    def steps(self, setup: Setup) -> tuple[StepRecord, ...]:
        """Return the steps of a run, as `run`; empty if there are no steps."""
        return () if self.run(setup) is None else read_steps(self._folder(setup) / METRICS_FILE)

    def kept(self, setup: Setup | None, file: str, measured: Callable[[], Any]) -> Any:
        """Return what a file of a run holds, measured once; None where there is no time left or it failed.

        Args:
            setup: of the run; None for the dense decoder.
            file: name of the file.
            measured: what to write there, as JSON.
        """
        path = (self.out / "runs" / "dense" if setup is None else self._folder(setup)) / file
        if not path.is_file():
            if self.seconds_left <= 0:
                return None
            name = f"{'dense' if setup is None else setup.name}: {file}"
            try:
                found = measured()
            except (DispfxError, RuntimeError) as error:
                self.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_json(path, {"found": found})
        return _read_json(path, ("found",))["found"]

    @contextmanager
    def as_folder(self, setup: Setup) -> Iterator[Path]:
        """Write the run's decoder as an output folder, for as long as it is needed."""
        plan = self.plan(setup)
        assert plan is not None
        with TemporaryDirectory(prefix="reproduce-") as place:
            common, out = self.common, Path(place) / "pruned"
            apply(common.model, plan, out=out, device=common.device, dtype=common.dtype, export="none")
            yield out

    def _folder(self, setup: Setup) -> Path:
        return self.out / "runs" / setup.name

    def _learned(self, setup: Setup, folder: Path) -> Outcome:
        notes: list[str] = []
        settings = self.settings(setup)
        folder.mkdir(parents=True, exist_ok=True)
        cut_off = saved_step(folder) is not None
        began = time.perf_counter()
        plan = learn(
            self.program,
            self.texts[setup.text].batches(settings),
            setup.ratio,
            align=self.common.align,
            settings=settings,
            compute=ComputeSettings(compile=self.common.compile),
            watch=Watch(folder, resume=True, note=notes.append),
        )
        seconds = None if cut_off else time.perf_counter() - began
        plan.save(folder / PLAN_FILE)
        pruned = lower(self.program, plan, write="gather-add")
        learns = settings.method == "learned"
        return Outcome(
            self._perplexities(pruned),
            plan.achieved,
            _count(pruned),
            settings.steps if learns else 0,
            settings.batch_size * settings.seq_len * settings.accumulate,
            seconds,
            tuple(notes),
        )

    def _perplexities(self, decoder: nn.Module) -> tuple[float, ...]:
        return tuple(
            measure(
                decoder,
                _measured(text),
                context=self.context,
                windows=self.common.windows,
                device=self.program.device,
                text=text.about,
            ).value
            for text in self.texts
        )

    def _facts(self) -> dict[str, Any]:
        """Return what the folder says about all its runs, after writing it where it is new.

        Raises:
            DataError: if its runs are of another decoder, text or protocol.
        """
        settings = self.settings(Setup(0.5))
        asked = {
            "model": shown(self.source.name),
            "fingerprint": self.program.fingerprint,
            "texts": [shown(text.learned_name) for text in self.texts],
            "measured": [shown(text.about.name) for text in self.texts],
            "tokens": [sum(map(len, text.learn)) for text in self.texts],
            "context": self.context,
            "windows": self.common.windows,
            "align": self.common.align,
            "settings": {key: value for key, value in asdict(settings).items() if key not in _OF_A_RUN},
        }
        path = self.out / FACTS_FILE
        if path.is_file():
            found = _read_json(path, ("dense", "device", "dtype", "versions", "date"))
            unlike = [key for key, value in asked.items() if found.get(key) != value]
            if unlike:
                raise DataError(
                    f"the runs in this folder differ in {', '.join(unlike)}",
                    where=str(self.out),
                    hint="give the arguments that it was made with, or another --out",
                )
            return found
        made = {
            "device": device_name(self.program.device),
            "dtype": str(self.program.dtype).removeprefix("torch."),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%d"),
            "dense": self._perplexities(self.program.graph_module),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        _write_json(path, asked | made)
        return json.loads(path.read_text(encoding="utf-8"))


def _texts(source: Source, common: Common) -> list[Text]:
    asked: list[Any] = [list(common.data) or None]
    if common.other_data:
        asked.append(list(common.other_data))
    elif source.origin == "demo":
        lines = [draw_lines(skill, _OTHER_SEED, _OTHER_LINES) for skill in _OTHER_SKILLS]
        mixed = "".join(line.text for pair in zip(*lines, strict=True) for line in pair)
        asked.append(encode(mixed, source.tokenizer))
    evaluated = list(common.eval_data) or None
    choices = [TextChoice(TextSettings(data, evaluated)) for data in asked]
    for chosen in choices:
        chosen.check()
    texts = [open_text(source, chosen) for chosen in choices]
    if len(texts) == 2 and isinstance(asked[1], Tensor):
        about = replace(texts[1].about, name=_OTHER_NAME)
        texts[1] = replace(texts[1], about=about, learned_name=_OTHER_NAME)
    return texts


def shown(names: str) -> str:
    """Return names without the folders of files, which tell nothing to a reader elsewhere."""
    return ", ".join(Path(name).name if Path(name).exists() else name for name in names.split(", "))


def _measured(text: Text) -> Tensor:
    if text.measure is None:
        raise DataError("text to learn from and to measure on is needed", hint="name one with --data")
    return text.measure


def _count(decoder: nn.Module) -> int:
    with torch.no_grad():
        return sum(parameter.numel() for parameter in decoder.parameters())


def _read_outcome(path: Path) -> Outcome:
    values = _read_json(path, tuple(field.name for field in fields(Outcome)))
    lists: dict[str, Any] = {key: tuple(values[key]) for key in ("perplexity", "notes")}
    return Outcome(**(values | lists))


def _read_json(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read what `_write_json` wrote.

    Raises:
        DataError: if the file is damaged or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in names if name not in values]
    except (ValueError, TypeError) as error:
        raise DataError(f"this file is damaged: {error}", where=str(path), hint="remove it") from error
    if missing:
        raise DataError(f"this file has no {', '.join(missing)}", where=str(path), hint="remove it")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=1, default=list) + "\n", encoding="utf-8")
