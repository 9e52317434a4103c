"""The sections of a run's settings, except learning: model, text, budget, compute, output.

A value of None means that the default depends on the model or the device; `Setting.default` says how.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dispfx.errors import BudgetError, DataError, DispfxError, OutputError, SourceError
from dispfx.settings.field import Section, field_of, required, same_as, section_fields, setting
from dispfx.settings.learning_settings import RECIPES
from dispfx.settings.tree import is_of_a_program
from dispfx.words.chosen_device import check_device
from dispfx.words.constraint_text import parse_constraint
from dispfx.words.given import path_given, shown
from dispfx.words.option_names import option
from dispfx.words.text_origin import LINE_BREAK, TEXT_BYTES, TEXT_FIELD, Bos

Switch = Literal["auto", "on", "off"]
Dtype = Literal["float32", "bfloat16", "float16"]
RatioOf = Literal["blocks", "total"]
Select = Literal["after-norm", "before-norm"]
# What a plan prunes on request, besides the paper's selections.
FurtherSites = Literal["heads", "attention-values"]
Target = Literal["cuda", "cpu"]
Export = Literal["none", "onnx", "pt2", "dense"]
# Of the widths, by the device that the result will run on.
ALIGNMENT: Mapping[str, int] = {"cuda": 16, "cpu": 8}
# Of plans that a program makes, for no device.
UNALIGNED = 1


@dataclass(frozen=True, eq=False)
class ModelSettings(Section):
    """The decoder, and how it is opened."""

    model: Any = required("`demo`, a folder, a .gguf file, a hub id, or package.module:function.", takes=str)
    revision: str | None = setting(None, "Branch, tag or commit of a hub id.")
    dtype: Dtype | None = setting(None, "Type of the weights.", default="that of the checkpoint")
    device: str | None = setting(None, "Device to run on: cpu, cuda or cuda:N.", default="cpu", common=True)
    tokenizer: str | None = setting(None, "Folder or hub id of a tokenizer, if MODEL has none.")
    trust_remote_code: bool = setting(False, "Run code that comes with the checkpoint.", per_run=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if isinstance(self.model, str) and self.model in RECIPES and not Path(self.model).exists():
            raise SourceError(
                f"{self.model} is a recipe of learning, and MODEL is a decoder",
                hint=f"name a decoder, as in `dispfx compile demo`, and add {option('recipe', self.model)}",
            )
        # A module is known by a method: nothing here imports torch.  A report only names a module.
        known = isinstance(self.model, str) or hasattr(self.model, "named_parameters")
        if not known and not is_of_a_program(self.model):
            raise DispfxError(
                f"a decoder was expected, but {shown(self.model)} was given",
                hint="give an nn.Module, or `demo`, a folder, a .gguf file, a hub id, or "
                "package.module:function",
            )


@dataclass(frozen=True, eq=False)
class TextSettings(Section):
    """Text to learn from and to measure on."""

    data: Any = setting(
        None,
        "Text to learn from: a UTF-8, .jsonl, .ndjson, .json, .jsonl.gz, .parquet or .safetensors (tokens) "
        "file, or datasets:NAME[:CONFIG[:SPLIT]]. May be repeated.",
        default="demo: its own text",
        common=True,
        repeats=str,
    )
    eval_data: Any = setting(
        None,
        f"Text to measure on, as {option('data')}. Never learned from. May be repeated.",
        default="the last tenth of the data",
        common=True,
        repeats=str,
    )
    data_weight: Sequence[float] | None = setting(
        None,
        f"Share of the sequences from each {option('data')}, in order.",
        default="texts are joined",
        repeats=float,
    )
    data_field: str = setting(TEXT_FIELD, "Field or column that holds the text.")
    data_bytes: int = setting(
        TEXT_BYTES,
        "Bytes of text to read at most. Longer text is sampled in evenly spaced pieces.",
        default=f"{TEXT_BYTES // 2**20} MiB",
        least=2**20,
        error=DataError,
    )
    bos: Bos = setting(
        "auto",
        "Begin sequences, windows and prompts with the beginning-of-sequence token.",
        default="auto: if the tokenizer adds it to text; never before token ids",
    )
    allow_unknown: bool = setting(
        False,
        "Read data even if the tokenizer does not know most of it, it is not text, or a text file holds JSON "
        "lines.",
    )
    eval_windows: int | None = setting(
        None, "Windows to measure on at most.", default="all", least=1, error=DataError
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "eval_data"):
            _require_texts(name, getattr(self, name))


@dataclass(frozen=True)
class Reading(Section):
    """How texts are read: these settings of text, and the separator of two texts or records."""

    data_field: str = same_as(TextSettings, "data_field")
    data_bytes: int = same_as(TextSettings, "data_bytes")
    bos: Bos = same_as(TextSettings, "bos")
    allow_unknown: bool = same_as(TextSettings, "allow_unknown")
    between: str = LINE_BREAK

    @staticmethod
    def of(chosen: TextSettings, between: str) -> "Reading":
        """Return how a run reads its texts."""
        own = {one.name: getattr(chosen, one.name) for one in section_fields(Reading)}
        return Reading(**own, between=between)


def _require_texts(name: str, given: Any) -> None:
    """Require names of texts, or for `data` token ids; a report only names what a program gave."""
    if given is None or is_of_a_program(given):
        return
    # A tensor is known by a method: nothing here imports torch.
    if name == "data" and hasattr(given, "untyped_storage"):
        if given.dim() != 1:
            raise DataError(f"a vector (N,) of token ids is needed, but {shown(given)} was given")
        return
    names = [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(names, list | tuple) or not all(isinstance(one, str | os.PathLike) for one in names):
        ids = " Token ids may be a vector of torch integers." if name == "data" else ""
        raise DataError(
            f"{option(name)} must be a file or data set, or a list of them, but {shown(given)} was given",
            hint=f"name a text, or a .safetensors file of token ids.{ids}",
        )


@dataclass(frozen=True)
class BudgetSettings(Section):
    """How much to remove, and from where."""

    ratio: float | str | None = setting(
        None,
        "Share of the prunable weights to remove. `learn` also takes a range, as in 0.1:0.6.",
        default="with a constraint, the smallest that meets it",
        above=0.0,
        below=1.0,
        common=True,
        error=BudgetError,
    )
    constraint: tuple[str, ...] = setting(
        (),
        "Upper limit that the result must meet: 'size: 6 GB' or 'size: 60%' (weights), 'memory 8x4096: "
        "12 GB' (weights and KV cache of 8 sequences of 4096 tokens), or with a latency table "
        "'decode 1@1024: 1.5x' or 'prefill 1x2048: 80 ms'. May be repeated.",
        metavar="TEXT",
        repeats=str,
    )
    kv_ratio: float | None = setting(
        None,
        "Share of the KV cache to remove, in bytes per token, by removing key/value heads (as "
        f"{option('sites', 'heads')}).",
        default="none by itself",
        above=0.0,
        below=1.0,
        error=BudgetError,
    )
    ratio_of: RatioOf = setting(
        "blocks", "Parameters that count: those that can be pruned, or all of them.", functions=True
    )
    align: int | None = setting(
        None,
        "Widths become multiples of this.",
        default=", ".join(f"{number} for {target}" for target, number in ALIGNMENT.items()),
        least=1,
    )
    target: Target | None = setting(None, "Device that the result will run on.", default="that of this run")
    costs: Any = setting(
        None,
        "Latency table of the target (`dispfx costs`). Branches that would become slower stay dense.",
        metavar="FILE",
        takes=Path,
    )
    skip: tuple[str, ...] = setting(
        (), "Branch to leave dense, a name or a pattern. May be repeated.", repeats=str
    )
    select: Select = setting(
        "after-norm",
        "Select features after every norm; or before them, with one selection for the whole residual stream "
        f"(needs {option('constrained', True)}).",
    )
    sites: tuple[FurtherSites, ...] = setting(
        (),
        "Also prune heads: key/value heads with their queries and their part of the cache. Or "
        "attention-values: features of the values of each head. May be repeated.",
        repeats=FurtherSites,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.ratio, str):
            object.__setattr__(self, "ratio", _range_of(self.ratio))
        for name in ("skip", "sites", "constraint"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        object.__setattr__(self, "constraint", tuple(parse_constraint(one).text for one in self.constraint))
        timed = [text for text in self.constraint if parse_constraint(text).is_time]
        if timed and self.costs is None:
            raise BudgetError(
                f"{option('constraint', timed[0])} needs a latency table with the times of that step",
                hint=f"measure one with `dispfx costs MODEL`, and name it with {option('costs')}",
            )
        if self.ratio is None and not self.constraint:
            raise BudgetError(
                f"{option('ratio')} is needed, or {option('constraint')}",
                hint="name the share of the weights to remove, or what the result must fit into",
            )
        if self.is_range and (self.constraint or self.kv_ratio is not None):
            other = "constraint" if self.constraint else "kv_ratio"
            raise BudgetError(
                f"{option(other)} is a target of one plan, and a range of ratios was given: {self.ratio}",
                hint=f"name one ratio, or leave out {option(other)}",
            )
        if self.kv_ratio is not None and "heads" not in self.sites:
            # Nothing else makes the cache smaller.
            object.__setattr__(self, "sites", (*self.sites, "heads"))

    @property
    def needs_cache(self) -> bool:
        """Whether the size of the KV cache matters."""
        memory = any(parse_constraint(text).kind == "memory" for text in self.constraint)
        return memory or self.kv_ratio is not None

    @property
    def is_range(self) -> bool:
        """Whether the ratio is a range."""
        return isinstance(self.ratio, str)

    @property
    def ratios(self) -> tuple[float, float]:
        """The smallest and the largest ratio; equal unless a range was given, and 0 if none was."""
        if self.ratio is None:
            return 0.0, 0.0
        low, _, high = str(self.ratio).partition(":")
        return float(low), float(high or low)


def _range_of(text: str) -> str:
    """Return a range of ratios, LOW:HIGH, as it is written in one way only.

    Raises:
        BudgetError: if the text names none.
    """
    try:
        shares = [float(part) for part in text.split(":")]
    except ValueError:
        shares = []
    facts = field_of(BudgetSettings, "ratio").facts
    percentage = next((hint for share in shares if (hint := facts.hint_for(share))), None)
    if len(shares) != 2 or not all(map(facts.allows, shares)) or shares[0] >= shares[1]:
        raise BudgetError(
            f"{option('ratio')} must be a share {facts.range_text()}, or a range, and {text!r} was given",
            hint=percentage or "as in 0.3, or 0.1:0.6 for a range from the smallest to the largest",
        )
    return f"{shares[0]!r}:{shares[1]!r}"


@dataclass(frozen=True)
class ComputeSettings(Section):
    """Speed and memory of learning."""

    compile: Switch = setting(
        "auto", "Compile each kind of layer once for learning.", default="auto: on CUDA"
    )
    checkpointing: Switch = setting(
        "auto", "Compute layers again in the backward pass.", default="auto: if memory is short"
    )
    launch: int | None = setting(
        None, "Processes on this host that share every batch.", least=1, default="1", per_run=True
    )
    shard: bool = setting(
        False,
        "Shard the weights over the processes (FSDP2), if one device is too small.",
        per_run=True,
    )
    shard_on: str | None = setting(
        None,
        "Device of this process, which has a part of the weights.",
        on_command_line=False,
        per_run=True,
    )
    replay: Switch = setting("auto", "Replay a step as one CUDA graph.", on_command_line=False)
    join: bool = setting(
        True, "Sum the gradients of projections that share an input in place.", on_command_line=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.shard_on)

    def compiles(self, device: Any) -> bool:
        """Whether to compile layers on a `torch.device`, if possible."""
        return self.compile == "on" or (self.compile == "auto" and device.type == "cuda")


class WritingSection(Section):
    """Base of a section with the output path of a verb."""

    out: Path | None

    @property
    def path(self) -> Path:
        """The folder or file to write, with ~ expanded.

        Raises:
            OutputError: if `--out` is missing.
        """
        if self.out is None:
            raise OutputError("an output path is needed", hint=f"name one with {option('out')}")
        return path_given(self.out, "the output")


def state_place(out: Path) -> Path:
    """Return DIR.state, where a run that writes `out` keeps its resumable state."""
    return out.with_name(f"{out.name}.state")


@dataclass(frozen=True)
class OutputSettings(WritingSection):
    """What is written, and where."""

    out: Path | None = setting(None, "Folder to write. It must not exist.", common=True, per_run=True)
    export: Export | None = setting(
        None,
        "What to write next to the checkpoint: an ONNX model, program.pt2, or dense: a full-size checkpoint "
        f"with zeros (with {option('select', 'before-norm')} a smaller ordinary one).",
        default="none; demo: onnx",
        common=True,
        functions=True,
        once="give one form here; `dispfx export` adds another one to the folder later",
    )
    resume: bool = setting(
        False, "Continue from the state that an interrupted run left.", common=True, per_run=True
    )
    dry_run: bool = setting(
        False,
        "Capture and analyse, estimate the run, and write nothing.",
        common=True,
        per_run=True,
    )

    config: Path | None = setting(
        None,
        "Settings of an earlier run: its report.json. Options given here override it; "
        f"{option('out')} is always needed.",
        metavar="FILE",
        common=True,
        per_run=True,
    )
