"""Sections of single verbs: evaluation, recovery, timing, costs, export, generation and sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dispfx.errors import BudgetError, DispfxError, OutputError, UnsupportedGraphError
from dispfx.settings.field import Section, required, same_as, setting
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.sections import (
    BudgetSettings,
    ComputeSettings,
    FurtherSites,
    ModelSettings,
    OutputSettings,
    WritingSection,
)
from dispfx.words.constraint_text import parse_step
from dispfx.words.option_names import option

Runtime = Literal["torch", "onnx"]
Quantize = Literal["none", "int8", "int4", "fp8"]
# Tokens that are read at once at most, unless a user asks for more.
LONGEST_CONTEXT = 2048
TIMED_BATCHES = (1, 8, 32, 128)
SAMPLED_TOKENS = 512
# `inspect` is given no ratio.
INSPECTED_RATIO = 0.3
# How a branch adds to the residual stream.
WriteSpelling = Literal["index-add", "gather-add"]


@dataclass(frozen=True, eq=False)
class EvaluationSettings(Section):
    """What a decoder is measured on."""

    dense: Any = setting(
        None,
        "MODEL that DIR was compiled from. Also measured, and compared by KL and top-1 agreement.",
        metavar="MODEL",
        takes=str,
        common=True,
    )
    context: int | None = setting(
        None,
        "Tokens per window, and at most per question.",
        default=f"{LONGEST_CONTEXT}, or the decoder's context if shorter",
        least=2,
    )
    tasks: tuple[str, ...] = setting(
        (), "Tasks of lm-eval, separated by commas (pip install 'dispfx[lm-eval]').", repeats=str, common=True
    )
    task_folder: Path | None = setting(
        None, "Folder with your own task files. They can run code: use only files that you trust."
    )
    shots: int | None = setting(
        None, "Answered examples before each question.", default="the task's own", least=0
    )
    limit: int | None = setting(None, "Questions per task at most.", default="all", least=1)
    batch_size: int = setting(1, "Questions per forward pass.", least=1)
    out: Path | None = setting(None, "Folder for eval.md and eval.json; `report DIR` shows them.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("task_folder", "shots", "limit") if getattr(self, name) is not None]
        if given and not self.task_names:
            raise DispfxError(
                f"{option(given[0])} has no effect: no task was named",
                hint=f"add {option('tasks')}, or leave it out",
            )

    @property
    def task_names(self) -> list[str]:
        """Names of all tasks; one argument may hold several, separated by commas."""
        words = [self.tasks] if isinstance(self.tasks, str) else self.tasks
        return [name.strip() for word in words for name in word.split(",") if name.strip()]


@dataclass(frozen=True, eq=False)
class TeacherSettings(Section):
    """What a pruned decoder learns to predict like."""

    dense: Any = required("What DIR was compiled from.", metavar="MODEL", takes=str, common=True)


@dataclass(frozen=True)
class RecoveredSettings(WritingSection):
    """What recovery writes, and where."""

    out: Path | None = same_as(OutputSettings, "out")
    merge: bool = setting(False, "Write a whole folder with the adapters merged in (LoRA).")
    resume: bool = same_as(OutputSettings, "resume")
    launch: int | None = same_as(ComputeSettings, "launch")


@dataclass(frozen=True, eq=False)
class TimingSettings(Section):
    """Which steps are timed."""

    dense: Any = setting(
        None,
        "MODEL that DIR was compiled from.",
        default="its class with random weights",
        metavar="MODEL",
        takes=str,
        common=True,
    )
    batch: Sequence[int] = setting(
        (), "Sequences. May be repeated.", default=", ".join(map(str, TIMED_BATCHES)), repeats=int, least=1
    )
    prompt: Sequence[int] = setting((), "Tokens of a prefill. May be repeated.", repeats=int, least=2)
    past: Sequence[int] = setting(
        (), "Cached tokens before a decode step. May be repeated.", repeats=int, least=1
    )
    mode: Literal["eager", "compiled", "both"] = setting("both", "How steps run.")
    runtime: Runtime = setting("torch", "What runs the decoders.")
    align: Sequence[int] = setting(
        (),
        "Also time the plan with widths that are multiples of this. May be repeated.",
        repeats=int,
        least=1,
    )
    out: Path | None = setting(None, "Folder for speed.md and speed.json, written after every row.")


@dataclass(frozen=True)
class MeasuringSettings(WritingSection):
    """What a latency table holds."""

    out: Path | None = setting(
        None, f"JSON file to write, for {option('costs')}. It must not exist.", common=True
    )
    step: tuple[str, ...] = setting(
        (),
        "Step to time, for a constraint: 'decode 1@1024' (batch, cached tokens) or 'prefill 1x2048' (batch, "
        "tokens). May be repeated.",
        default="decode 1@512 and prefill 1x512; CPU: 64 tokens",
        metavar="TEXT",
        repeats=str,
        common=True,
    )
    mode: Literal["eager", "compiled"] | None = setting(
        None, "How steps run.", default="compiled on a GPU, eager on a CPU"
    )
    align: int | None = same_as(BudgetSettings, "align")
    sites: tuple[FurtherSites, ...] = setting(
        (), "Also measure what removing key/value heads saves.", repeats=FurtherSites
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("step", "sites"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        for text in self.step:
            parse_step(text)


@dataclass(frozen=True)
class FormSettings(Section):
    """Which forms of the decoder are written."""

    onnx: bool = setting(False, "Write DIR/onnx/.", common=True)
    pt2: bool = setting(False, "Write DIR/program.pt2.", common=True)
    # The converter of torch writes these: older sets lack operators that it uses.
    opset: int = setting(23, "ONNX operator set.", least=18, most=24, error=UnsupportedGraphError)
    write: WriteSpelling = setting(
        "gather-add", "How the ONNX model writes into the residual stream; index-add is slow."
    )
    ort_fusions: bool = setting(False, "Use ONNX Runtime's own operators if the result verifies.")
    no_padding: bool = setting(False, "Leave out the attention mask. The model then accepts no padding.")
    quantize: Quantize = setting(
        "none",
        "Write DIR/int8/, DIR/int4/ or DIR/fp8/, the checkpoint with weights of 8 or 4 bits; with "
        f"{option('onnx', True)} DIR/onnx-int8/ or DIR/onnx-int4/, the ONNX model. int4 needs "
        f"{option('data')}.",
        common=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize == "fp8" and self.onnx:
            raise OutputError(
                "an ONNX model cannot have weights of fp8",
                hint=f"choose int8 or int4, or leave out {option('onnx', True)} for a checkpoint",
            )

    @property
    def shapes_onnx(self) -> bool:
        """Whether an option says how the ONNX model is written."""
        usual = FormSettings()
        names = ("opset", "write", "ort_fusions", "no_padding")
        return any(getattr(self, name) != getattr(usual, name) for name in names)


@dataclass(frozen=True)
class GenerationSettings(Section):
    """How a text is continued."""

    prompt: str = required("Text to continue.")
    max_new_tokens: int = setting(64, "Tokens to add.", least=1)
    temperature: float = setting(0.0, "Sampling temperature; 0 takes the likeliest token.", least=0.0)
    top_k: int | None = setting(None, "Sample from the k likeliest tokens.", default="all", least=1)
    seed: int = same_as(LearnSettings, "seed")
    runtime: Runtime = setting("torch", "What runs the decoder.")


@dataclass(frozen=True)
class SamplingSettings(WritingSection):
    """How much text a decoder writes, and where it begins."""

    out: Path | None = setting(
        None, f"Token file to write, for {option('data')}. It must not exist.", common=True
    )
    tokens: int = setting(1_000_000, "Tokens to write.", least=1, common=True)
    seq_len: int | None = setting(
        None, "Tokens per sequence.", default=f"{SAMPLED_TOKENS}, or what the decoder reads", least=2
    )
    opening: int = setting(32, "Tokens of a text that a sequence begins with.", least=1)
    batch_size: int = setting(64, "Sequences that are written at once.", least=1, common=True)
    temperature: float = setting(
        1.0, "Sampling temperature; at 1 tokens are as likely as the decoder says.", above=0.0
    )
    seed: int = same_as(LearnSettings, "seed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None and self.path.suffix.lower() != ".safetensors":
            raise OutputError(
                "the name of a token file must end in .safetensors, because it is read as text otherwise",
                where=str(self.out),
            )


@dataclass(frozen=True)
class PlanSettings(Section):
    """Which plan is applied."""

    plan: Any = required("A plan.safetensors, or a family of plans.", takes=Path)
    ratio: float | None = setting(
        None,
        "Which plan of a family: the share of the prunable weights to remove.",
        above=0.0,
        below=1.0,
        common=True,
        error=BudgetError,
    )


@dataclass(frozen=True)
class FamilySettings(Section):
    """Which decoders of a family are measured."""

    family: Any = required("A family of plans, which `learn` writes for a range of ratios.", takes=Path)
    points: int = setting(
        6, "Ratios to measure, evenly spaced over the range.", least=2, most=200, common=True
    )
    within: float | None = setting(
        None,
        "Also find the smallest decoder with at most this KL divergence from the dense one, in nats.",
        above=0.0,
        common=True,
    )
    context: int | None = same_as(EvaluationSettings, "context")
    out: Path | None = setting(None, "Write a page (.html) with the plot, and the plot as PNG.", common=True)


@dataclass(frozen=True)
class InspectionSettings(Section):
    """How much is read."""

    config_only: bool = setting(False, "Read the config and no weights.", common=True)


@dataclass(frozen=True)
class FolderSettings(Section):
    """Which folder."""

    folder: Path = required("A folder that dispfx wrote.")
    trust_remote_code: bool = same_as(ModelSettings, "trust_remote_code")


@dataclass(frozen=True)
class PathsSettings(Section):
    """What is compared."""

    paths: Sequence[Path] = required("Folders that dispfx wrote, or two plans.", repeats=Path)
    out: Path | None = setting(
        None, "Of folders: write a page (.html) with the plot, and the plot as PNG.", common=True
    )
