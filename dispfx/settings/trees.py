"""The settings of every verb, as trees of sections.

`RunSettings` is what compile, learn, apply and preview take, what the processes of a run share, and what
report.json stores.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dispfx.errors import DispfxError, OutputError
from dispfx.settings.learning_settings import (
    LearnSettings,
    RecipeSettings,
    changed_settings,
    learn_settings,
)
from dispfx.settings.recovery_settings import AfterwardsSettings, RecoverySettings
from dispfx.settings.sections import (
    BudgetSettings,
    ComputeSettings,
    ModelSettings,
    OutputSettings,
    TextSettings,
)
from dispfx.settings.tree import Tree
from dispfx.settings.verb_settings import (
    EvaluationSettings,
    FamilySettings,
    FolderSettings,
    FormSettings,
    GenerationSettings,
    InspectionSettings,
    MeasuringSettings,
    PathsSettings,
    PlanSettings,
    RecoveredSettings,
    SamplingSettings,
    TeacherSettings,
    TimingSettings,
)
from dispfx.words.chosen_device import local_device
from dispfx.words.option_names import option


@dataclass(frozen=True, eq=False)
class RunSettings(Tree):
    """One run that learns or applies a plan.

    Args:
        model: the decoder.
        text: to learn from and to measure on.
        budget: how much to remove.
        recipe: which defaults of learning were chosen.
        learning: how masks are learned, with the defaults of recipe and model filled in.
        compute: how fast, and on how many processes.
        afterwards: what is trained after pruning.
        output: what is written.
    """

    model: ModelSettings
    text: TextSettings
    budget: BudgetSettings
    recipe: RecipeSettings
    learning: LearnSettings
    compute: ComputeSettings
    afterwards: AfterwardsSettings
    output: OutputSettings

    @classmethod
    def _section(cls, name: str, kind: type, flat: Mapping[str, Any]) -> Any:
        if kind is not LearnSettings:
            return super()._section(name, kind, flat)
        for_range = ":" in str(flat.get("ratio"))
        return learn_settings(
            flat.get("model"), recipe=flat.get("recipe"), for_range=for_range, **_learning_of(flat)
        )

    def changed(self, **flat: Any) -> Self:
        """Return the settings with other values; chosen sizes of learning are not adapted any more."""
        if flat.get("recipe") not in (None, self.recipe.recipe):
            raise DispfxError("a recipe is chosen where settings are made, and cannot be changed later")
        learning = _learning_of(flat)
        rest = {name: value for name, value in flat.items() if name not in learning}
        found = super().changed(**rest)
        return replace(found, learning=changed_settings(found.learning, learning)) if learning else found

    @property
    def recovery(self) -> RecoverySettings | None:
        """How the pruned decoder is trained after learning, with the seed of the run; None if it is not."""
        found = self.afterwards.recovery
        return None if found is None else replace(found, seed=self.learning.seed)

    @property
    def placed_model(self) -> ModelSettings:
        """The decoder as this process opens it; on the CPU if no device may hold all of it."""
        device = local_device(self.model.device) if self.compute.shard_on is None else "cpu"
        return replace(self.model, device=device)

    def fitted(self, learning: LearnSettings) -> Self:
        """Return the settings with those of learning as a decoder was learned with."""
        return replace(self, learning=learning)


@dataclass(frozen=True, eq=False)
class ApplySettings(Tree):
    """`apply`: a run without learning, from a plan."""

    model: ModelSettings
    text: TextSettings
    plan: PlanSettings
    output: OutputSettings


@dataclass(frozen=True, eq=False)
class CurveSettings(Tree):
    """`curve`: size and quality over the ratios of a family."""

    model: ModelSettings
    text: TextSettings
    curve: FamilySettings


@dataclass(frozen=True, eq=False)
class InspectSettings(RunSettings):
    """`inspect`: a run that stops before learning."""

    inspection: InspectionSettings


def _learning_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    names = LearnSettings.__dataclass_fields__
    return {name: value for name, value in flat.items() if name in names}


@dataclass(frozen=True, eq=False)
class EvalSettings(Tree):
    """`eval`: perplexity on a text, agreement with the dense decoder, accuracy in tasks."""

    model: ModelSettings
    text: TextSettings
    evaluation: EvaluationSettings


@dataclass(frozen=True, eq=False)
class RecoverSettings(Tree):
    """`recover`: the decoder of a folder, trained to predict what the dense one predicts."""

    model: ModelSettings
    teacher: TeacherSettings
    text: TextSettings
    recovery: RecoverySettings
    output: RecoveredSettings

    def __post_init__(self) -> None:
        folder, path = Path(self.model.model).expanduser(), self.output.path
        if folder.exists() and path.exists() and path.samefile(folder):
            raise OutputError(
                "the recovered decoder cannot be written over the folder that it is made from",
                where=str(path),
                hint=f"name another folder with {option('out')}",
            )
        if self.model.dtype is not None and self.recovery.train != "lora":
            raise DispfxError(
                f"{option('dtype')} is that of frozen weights under adapters, and weights are trained in the "
                "type that the folder has",
                where=str(self.model.model),
                hint=f"leave out {option('dtype')}, or train adapters with {option('train', 'lora')}",
            )


@dataclass(frozen=True, eq=False)
class BenchSettings(Tree):
    """`bench`: speed of a folder's decoder next to the dense one."""

    model: ModelSettings
    text: TextSettings
    timing: TimingSettings


@dataclass(frozen=True, eq=False)
class CostsSettings(Tree):
    """`costs`: a latency table of a decoder on a device."""

    model: ModelSettings
    measuring: MeasuringSettings


@dataclass(frozen=True, eq=False)
class ExportSettings(Tree):
    """`export`: other forms of a folder's decoder."""

    model: ModelSettings
    text: TextSettings
    forms: FormSettings

    def __post_init__(self) -> None:
        if self.text.data is not None and self.forms.quantize == "none":
            raise DispfxError(
                f"{option('data')} has no effect: no weights are rounded",
                hint=f"add {option('quantize', 'int4')}, or leave it out",
            )


@dataclass(frozen=True, eq=False)
class GenerateSettings(Tree):
    """`generate`: continue a text."""

    model: ModelSettings
    text: TextSettings
    generation: GenerationSettings


@dataclass(frozen=True, eq=False)
class SampleSettings(Tree):
    """`sample`: text that a decoder writes itself."""

    model: ModelSettings
    text: TextSettings
    sampling: SamplingSettings


@dataclass(frozen=True, eq=False)
class VerifySettings(Tree):
    """`verify` and `report`: what a folder holds."""

    folder: FolderSettings


@dataclass(frozen=True, eq=False)
class CompareSettings(Tree):
    """`compare`: runs or plans side by side."""

    paths: PathsSettings


@dataclass(frozen=True, eq=False)
class NoSettings(Tree):
    """Verbs without settings of their own."""


TREES: tuple[type[Tree], ...] = (
    RunSettings,
    ApplySettings,
    InspectSettings,
    CurveSettings,
    EvalSettings,
    RecoverSettings,
    BenchSettings,
    CostsSettings,
    ExportSettings,
    GenerateSettings,
    SampleSettings,
    VerifySettings,
    CompareSettings,
    NoSettings,
)
