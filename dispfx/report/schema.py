"""The contents of report.json, as frozen dataclasses.

The field names are the file's names, which other programs rely on.  Counts and bytes are those of the
written files, read back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from dispfx.ir.lengths import Lengths
from dispfx.learning.distillation import HeldOut
from dispfx.settings.recovery_settings import Train
from dispfx.settings.sections import RatioOf
from dispfx.verification.equivalence import Verification
from dispfx.words.choices import require_choice
from dispfx.words.own_function import is_identity

# Less is what rounding may do.
_NOTICED_KL = 0.01


@dataclass(frozen=True)
class Ratio:
    """Requested and achieved share of removed parameters.

    Args:
        requested: by the user, in (0, 1).
        achieved: what the plan removes.
        of: the counted parameters: those that some site cuts (`blocks`) or all of them (`total`); or the name
            and digest of a user's cost.
    """

    requested: float
    achieved: float
    of: str

    def __post_init__(self) -> None:
        """Raise DispfxError unless `of` is one of these."""
        if not is_identity(self.of):
            require_choice(get_args(RatioOf), self.of, "of")

    @property
    def counted(self) -> str:
        """What the ratio counts, for people."""
        return {"blocks": "the prunable weights", "total": "all parameters"}.get(self.of, self.of)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Args:
        dense: before.
        pruned: after, counted from the written files.
        gated: those of the dense decoder that some site cuts.
    """

    dense: int
    pruned: int
    gated: int


@dataclass(frozen=True)
class Bytes:
    """Bytes of the dense decoder's tensors, and of the written weight files or `program.pt2`."""

    dense: int
    pruned: int


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of the KV cache for each token.

    Args:
        dense: of the dense decoder.
        pruned: of the written checkpoint, in transformers.
        onnx: of an ONNX model that was written with it, where it differs: its values may be smaller.
    """

    dense: int
    pruned: int
    onnx: int | None = None

    @property
    def by_form(self) -> list[tuple[str, int]]:
        """What follows the name of the cache in a row, and the bytes, of every form that has its own."""
        forms = (("", self.pruned), (", ONNX", self.onnx))
        return [(name, kept) for name, kept in forms if kept is not None]

    def with_onnx(self, kept: int | None) -> "CacheBytes":
        """Return the same with the bytes of an ONNX model, if one was written and they differ."""
        return replace(self, onnx=None if kept == self.pruned else kept)


@dataclass(frozen=True)
class CacheRatio:
    """Share of the KV cache that was to be removed, and that the kept heads remove."""

    requested: float
    achieved: float


@dataclass(frozen=True)
class MetConstraint:
    """How a plan meets a constraint, in bytes or seconds.

    Args:
        text: of the constraint.
        dense: what the dense decoder takes.
        most: what was allowed.
        left: what the pruned decoder takes, as counted before it was written.
    """

    text: str
    dense: float
    most: float
    left: float


@dataclass(frozen=True)
class Protocol:
    """How perplexity was measured; the fields are those of `dispfx.quality.perplexity.Perplexity`."""

    text: str
    context: int
    windows: int
    tokens: int
    held_out_share: float | None
    bos: tuple[int, ...] = ()
    unknown_share: float | None = None

    @property
    def begins(self) -> str:
        """A sentence on the tokens that every window begins with, or an empty string."""
        if not self.bos:
            return ""
        shown = " ".join(map(str, self.bos))
        return f" Every window begins with token {shown}, which is not predicted."


@dataclass(frozen=True)
class PerplexityChange:
    """Perplexity before and after, under one protocol."""

    dense: float
    pruned: float
    protocol: Protocol


@dataclass(frozen=True)
class Behaviour:
    """How alike the pruned and the dense decoder predict a text; the first one's windows are `perplexity`'s.

    Args:
        text: its name.
        tokens: that were predicted.
        kl: mean over tokens of KL(dense ‖ pruned), in nats.
        top1: share of tokens for which both find the same one likeliest.
        perplexity_dense, perplexity_pruned: on this text.
    """

    text: str
    tokens: int
    kl: float
    top1: float
    perplexity_dense: float
    perplexity_pruned: float

    @property
    def flattered(self) -> bool:
        """Whether the pruned decoder predicts the text better than the dense one, and otherwise than it."""
        return self.perplexity_pruned < self.perplexity_dense and self.kl > _NOTICED_KL


@dataclass(frozen=True)
class SkillChange:
    """Share of a skill's questions answered correctly, before and after."""

    dense: float
    pruned: float


@dataclass(frozen=True)
class SiteWidth:
    """How many of a site's features are kept."""

    name: str
    kind: str
    size: int
    kept: int


@dataclass(frozen=True)
class Refused:
    """A branch or site that was left dense, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Tuning:
    """How a pruned decoder was trained to predict what the dense one predicts, and the effect.

    Args:
        base: folder of the decoder that was trained.
        dense: MODEL that it was trained towards.
        train: scales, weights or lora.
        data: name of the training text.
        parameters: number of trained parameters.
        before, after: perplexity of the pruned decoder, under one protocol.
        kl_before, kl_after: KL(dense ‖ pruned) on the second text, in nats per token.
        kl_text, kl_tokens: that text, and how many tokens of it were compared.
        kept: False where KL on the second text had risen, so that the weights stayed what they were.
        held_out: KL on the held-out end of the data, measured during the run; the least of them is kept.
        steps_done: optimizer steps until held-out KL stopped falling.
        rank, alpha, lr, steps, batch_size, seq_len, seed, stream_weight: as in
            `dispfx.settings.recovery_settings.RecoverySettings`.
        made_from: digests of the two decoders, the text and the settings, by name.
    """

    base: str
    dense: str
    train: Train
    data: str
    parameters: int
    before: float
    after: float
    protocol: Protocol
    kl_before: float
    kl_after: float
    kl_text: str
    kl_tokens: int
    kept: bool
    held_out: tuple[HeldOut, ...]
    steps_done: int
    rank: int
    alpha: float
    lr: float
    steps: int
    batch_size: int
    seq_len: int
    seed: int
    stream_weight: float = 0.0
    made_from: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class QuantizedQuality:
    """How alike an ONNX model predicts a text before and after its weights were quantized.

    Args:
        kl: mean over tokens of KL(before ‖ after), in nats.
        top1: share of tokens for which both find the same one likeliest.
        perplexity_before, perplexity_after: in ONNX Runtime, under one protocol.
    """

    kl: float
    top1: float
    perplexity_before: float
    perplexity_after: float
    protocol: Protocol


@dataclass(frozen=True)
class Quantized:
    """An ONNX model or a checkpoint with weights in fewer bits.

    Args:
        name: int8, int4 or fp8.
        bytes_before: of the ONNX model, or of the weights of the checkpoint, that it was made from.
        bytes_after: of its own.
        quality: what quantization costs; None if there was no text to measure on.
        left: weights that are not quantized.
        verify: its comparisons.
        files: SHA-256 of each of its files by its path in the folder.
        form: onnx or checkpoint.
        rounded_by: name of the text by which weights were rounded; empty if they were rounded to nearest.
        unfit: layers among `left` whose inputs do not fill the groups of the scheme.
    """

    name: str
    bytes_before: int
    bytes_after: int
    quality: QuantizedQuality | None
    left: tuple[str, ...]
    verify: tuple[Verification, ...]
    files: Mapping[str, str]
    form: Literal["onnx", "checkpoint"] = "onnx"
    rounded_by: str = ""
    unfit: tuple[str, ...] = ()


@dataclass(frozen=True)
class UngatedWeights:
    """Block weights that no site cuts, for one reason: how many parameters, and their paths."""

    reason: str
    parameters: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """One compilation.

    Args:
        ratio: requested and achieved.
        parameters: before and after.
        bytes: before and after.
        perplexity: before and after; None if no text was given to measure on.
        behaviour: of the two decoders on each measured text; empty in reports without this entry.
        verify: every comparison of two forms of the pruned decoder.
        sites: number of kept features per site.
        refused: branches and sites that were left dense.
        ungated: block weights that no site cuts, by reason; empty in older reports.
        seed: of all randomness.
        versions: of Python and of the libraries used.
        device: of the run.
        seconds: by stage, in order.
        command: the command line or call that reproduces this result.
        skills: share of correct answers by skill, if the model has a probe; not written when empty.
        tuned: how the weights were trained after pruning; not written when None.
            `verify` then holds the comparisons that prove the cut and those of the new weights.
        files: SHA-256 of each file of the decoder by its path in the folder, without files that `export` adds
            later.  Empty in older reports.
        onnx_without_cache: why the ONNX model written with the folder has no KV cache, if it has none.
        cache: of a plan that prunes heads or values, for a decoder of transformers.
        kv_ratio: of a budget that names a share of the KV cache; not written when None.
        constraints: of the budget; not written when empty.
        lengths: sequence lengths for which the decoder's graph holds; None in older reports.
        settings: every setting of the run by section (`dispfx.settings.RunSettings`); None if a plan was
            applied.
        quantized: ONNX models that `export --quantize` added later; not written when empty.
    """

    ratio: Ratio
    parameters: Parameters
    bytes: Bytes
    perplexity: PerplexityChange | None
    verify: tuple[Verification, ...]
    sites: tuple[SiteWidth, ...]
    refused: tuple[Refused, ...]
    seed: int
    versions: Mapping[str, str]
    device: str
    seconds: Mapping[str, float]
    command: str
    behaviour: tuple[Behaviour, ...] = ()
    skills: Mapping[str, SkillChange] = field(default_factory=dict)
    tuned: Tuning | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    onnx_without_cache: str | None = None
    ungated: tuple[UngatedWeights, ...] = ()
    lengths: Lengths | None = None
    cache: CacheBytes | None = None
    kv_ratio: CacheRatio | None = None
    constraints: tuple[MetConstraint, ...] = ()
    quantized: tuple[Quantized, ...] = ()

    @property
    def attention_widths(self) -> list[tuple[str, int, int]]:
        """Name, size and kept number of the key/value heads and of the features of values that are sites.

        A head that goes takes its values with it, and all heads of a layer keep equally many.
        """
        heads = {one.name.rpartition(".")[0]: one for one in self.sites if one.kind == "heads"}
        found = []
        for kind, name in (("heads", "key/value heads"), ("values", "features of values")):
            sites = [one for one in self.sites if one.kind == kind]
            kept = 0
            for one in sites:
                of_layer = heads.get(one.name.rpartition(".")[0]) if kind == "values" else None
                kept += one.kept if of_layer is None else one.kept * of_layer.kept // of_layer.size
            if sites:
                found.append((name, sum(one.size for one in sites), kept))
        return found

    @property
    def comparisons(self) -> tuple[Verification, ...]:
        """Those of the folder, and those of its quantized models."""
        return (*self.verify, *(line for one in self.quantized for line in one.verify))

    def _repr_html_(self) -> str:
        from dispfx.report.table import report_html

        return report_html(self)
