"""Every option of every verb, once; verbs name the ones they take.

An option that the user does not give is None, and the compiler's own default holds.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dispfx.learning.settings import BudgetOn as BudgetOnName
from dispfx.learning.settings import EstimatorName, HypernetworkName, RecipeName
from dispfx.learning.settings import Method as MethodName
from dispfx.learning.settings import Packing as PackingName
from dispfx.learning.settings import Schedule as ScheduleName
from dispfx.learning.settings import Start as StartName

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="`demo`, a folder, a .gguf file, a hub id, or package.module:function.",
        show_default=False,
    ),
]
ModelOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder that dispfx wrote, or any MODEL that `compile` takes.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A folder that dispfx wrote.", show_default=False)
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.safetensors.", show_default=False)]

# What every verb takes.
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")]

# Where the decoder comes from.
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
DtypeName = Literal["float32", "bfloat16", "float16"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(help="Type of the weights; that of the checkpoint by default."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, or cuda:N.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or hub id of a tokenizer, where MODEL has none.")]

ConfigOnly = Annotated[
    bool,
    typer.Option(
        "--config-only", help="Read the config and no weights; so it is, too, where there are no weights."
    ),
]

# The budget.
RatioShare = Annotated[float, typer.Option("--ratio", help="Share of the parameters to remove, in (0, 1).")]
RatioOf = Annotated[
    Literal["blocks", "total"],
    typer.Option(help="Count the layers' weights, or embeddings and head too."),
]
Align = Annotated[
    int | None, typer.Option(min=1, help="Widths become multiples of this: 16 for cuda, 8 for cpu.")
]
Costs = Annotated[
    Path | None,
    typer.Option(
        help="Times on the target device, from tools/measure_costs.py; what would be slower is left dense."
    ),
]
Skip = Annotated[
    list[str] | None, typer.Option(help="A branch to leave as it is; can be given several times.")
]
Target = Annotated[
    Literal["cuda", "cpu"] | None, typer.Option(help="What the result is for; the device by default.")
]

# Text.
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Text to learn from: a UTF-8, .jsonl, .json, .jsonl.gz, .parquet or .safetensors (tokens) "
        "file, or datasets:NAME[:CONFIG[:SPLIT]]; can be given several times."
    ),
]
EvalData = Annotated[
    list[str] | None,
    typer.Option(
        help="Text to measure perplexity on, as --data; by default the last tenth of the data, never "
        "learned from."
    ),
]
DataWeight = Annotated[
    list[float] | None,
    typer.Option(
        help="Share of the sequences from a --data, one each, in order; without, the texts are joined."
    ),
]
DataField = Annotated[
    str | None, typer.Option(help="What holds the text in JSON lines, parquet and data sets (text).")
]
DataBytes = Annotated[
    int | None,
    typer.Option(
        min=2**20, help="Read so much text at most, of a longer one evenly spaced pieces (128 MiB)."
    ),
]
Bos = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        help="Begin sequences, windows and prompts with the beginning-of-sequence token; auto: where the "
        "tokenizer puts it in front of a text, and not before token ids."
    ),
]
AllowUnknown = Annotated[
    bool,
    typer.Option(
        "--allow-unknown", help="Read a text even if most of it is unknown to the tokenizer, or no text."
    ),
]
EvalWindows = Annotated[
    int | None, typer.Option(min=1, help="Measure on the first so many windows of the text only.")
]

# Learning.
Recipe = Annotated[
    RecipeName | None,
    typer.Option(help="Settings to start from (informed); each has an option of its own."),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Masks drawn a step; a divisor of the batch size (one a sequence; 1 where experts sort tokens)."
    ),
]
Packing = Annotated[
    PackingName | None,
    typer.Option(
        help="What a sequence is: one text, or documents that do not see each other, each ended by the "
        "tokenizer's own token for that (joined)."
    ),
]
Start = Annotated[
    StartName | None,
    typer.Option(help="First logits: all alike, or by how sensitive the loss is (sensitivity)."),
]
Method = Annotated[
    MethodName | None,
    typer.Option(help="How features are chosen: learned, or scored once (learned)."),
]
Steps = Annotated[int | None, typer.Option(help="Steps of learning (5,000; demo: 400).")]
SeqLen = Annotated[
    int | None, typer.Option(help="Tokens a sequence (2048, or what the decoder reads; demo: 128).")
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Sequences a pass, of all processes (2, or more where they are shorter; demo: 8)."),
]
Accumulate = Annotated[
    int | None, typer.Option(help="Passes a step, for a larger batch than memory holds (1).")
]
Schedule = Annotated[
    ScheduleName | None,
    typer.Option(help="How the learning rate goes on (cosine, to 0; demo: constant)."),
]
WeightDecay = Annotated[float | None, typer.Option(help="Of AdamW (1; demo: 0.05).")]
Bias = Annotated[float | None, typer.Option(help="Added to every logit, so that learning starts whole (3).")]
Temperature = Annotated[float | None, typer.Option(help="Of the estimator (1).")]
Antithetic = Annotated[
    bool | None,
    typer.Option(
        help="Draw masks in pairs from opposite random numbers (so it is, with two or more samples)."
    ),
]
Sharpen = Annotated[
    float | None,
    typer.Option(help="Multiply logits by up to this over the second half of the steps, 1 for never (3)."),
]
Lr = Annotated[float | None, typer.Option(help="Learning rate (3e-3).")]
Lambda = Annotated[float | None, typer.Option("--lambda", help="Weight of the budget loss (6).")]
BudgetOn = Annotated[
    BudgetOnName | None,
    typer.Option(help="What the budget loss counts: masks as drawn, or how likely each is (probabilities)."),
]
BudgetWidth = Annotated[
    float | None,
    typer.Option(help="Ease the budget loss where it is below this, 0 for nowhere (0.1)."),
]
Estimator = Annotated[
    EstimatorName | None,
    typer.Option(help="How gradients pass the sampled masks (reinmax)."),
]
Hypernetwork = Annotated[HypernetworkName | None, typer.Option(help="What the masks come from (full).")]
Constrained = Annotated[bool, typer.Option("--constrained", help="All reads and writes share one selection.")]
Select = Annotated[
    Literal["after-norm", "before-norm"],
    typer.Option(
        help="Select behind every norm; or before them, one selection for the whole stream, embedding and "
        "head included, with --constrained."
    ),
]
Launch = Annotated[
    int | None,
    typer.Option(min=1, help="Learn with so many processes on this host; they share every batch."),
]
Shard = Annotated[
    bool,
    typer.Option(
        "--shard",
        help="Each process has a part of the weights on its device only, for a decoder too large for one.",
    ),
]
Compile = Annotated[
    Literal["auto", "on", "off"],
    typer.Option("--compile", help="Compile each kind of layer once for learning; auto: on CUDA."),
]
Checkpointing = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(help="Compute layers again in the backward pass; auto: where memory is short."),
]
Seed = Annotated[int | None, typer.Option(help="Of everything random (0).")]
SaveEvery = Annotated[int | None, typer.Option(help="Steps between two saved states (500).")]
MaxBadSteps = Annotated[
    int | None, typer.Option(help="Steps in a row without a finite loss and gradient that end the run (10).")
]
FromReport = Annotated[
    Path | None,
    typer.Option(
        metavar="report.json",
        help="Repeat the run that wrote this report; MODEL and all options are its own, but for --out and "
        "how it runs.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Capture and analyse, say what would be done and what it takes; write nothing."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the state that an interrupted run left.")]

# Output.
Out = Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist.")]
PlanOut = Annotated[Path, typer.Option("--out", help="Plan file to write; it must not exist.")]
Export = Annotated[
    Literal["none", "onnx", "pt2", "dense"] | None,
    typer.Option(
        help="What to write beside the checkpoint: an ONNX model, program.pt2, or dense: a full-size "
        "checkpoint with zeros, or with --select before-norm a smaller ordinary one (demo: onnx, otherwise: "
        "none)."
    ),
]
PrintAfter = Annotated[
    list[str] | None,
    typer.Option(help="Print the graph after the pass of this name; can be given several times."),
]
