"""How a pruned decoder is trained to predict what the dense one predicts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from dispfx.errors import DispfxError
from dispfx.settings.field import Section, same_as, section_fields, setting
from dispfx.settings.learning_settings import LearnSettings
from dispfx.words.option_names import option

Train = Literal["scales", "weights", "lora"]
Recover = Literal["none", "scales", "weights"]

# What nobody chose, by what is trained: of any decoder, and of the demo.  It is small: it takes larger steps,
# and fewer of them.
_STEPS: Mapping[str, tuple[int, int]] = {"weights": (1000, 200), "scales": (600, 200), "lora": (1000, 200)}
_LR = {"weights": (2e-4, 1e-3), "scales": (1e-2, 2e-2), "lora": (1e-3, 1e-2)}
_BATCH_SIZE, _SEQ_LEN = (16, 8), (512, 128)
_STREAM_WEIGHT = {"weights": 30.0, "scales": 0.0, "lora": 0.0}
_MEASUREMENTS = 20
# Share of the steps over which the learning rate rises.
WARM_UP = 0.05
_STEPS_SHOWN = f"{_STEPS['weights'][0]:,}; scales: {_STEPS['scales'][0]}; demo: {_STEPS['weights'][1]}"


@dataclass(frozen=True)
class RecoverySettings(Section):
    """How the pruned decoder is trained."""

    train: Train = setting(
        "weights",
        "What is trained: a scale per kept feature, folded into the weights; all weights; adapters (LoRA).",
        common=True,
    )
    # These six are None until a decoder and a kind of training say more.
    steps: int = setting(None, "Optimizer steps at most.", default=_STEPS_SHOWN, least=1, common=True)
    lr: float = setting(
        None,
        f"Highest learning rate of AdamW; it rises over the first {WARM_UP:.0%} of the steps, "
        "and falls to zero.",
        default=f"{_LR['weights'][0]:g}; scales: {_LR['scales'][0]:g}; lora: {_LR['lora'][0]:g}; demo: "
        + ", ".join(f"{of_demo:g}" for _, of_demo in _LR.values()),
        above=0.0,
        most=3e38,
    )
    stream_weight: float = setting(
        None,
        "Weight of the distance to the dense decoder's residual stream, which is added to KL.",
        default=f"{_STREAM_WEIGHT['weights']:g}; scales, lora: 0",
        least=0.0,
        most=1e6,
    )
    seq_len: int = setting(
        None,
        "Tokens per sequence.",
        default=f"{_SEQ_LEN[0]}, or what the decoder reads; demo: {_SEQ_LEN[1]}",
        least=2,
    )
    measure_every: int = setting(
        None, "Steps between two measurements of held-out KL.", default="a twentieth of the steps", least=1
    )
    batch_size: int = setting(
        None,
        "Sequences per step, of all processes.",
        default=f"{_BATCH_SIZE[0]}; demo: {_BATCH_SIZE[1]}",
        least=1,
        common=True,
    )
    patience: int = setting(
        5, "Measurements of held-out KL in a row without a better one that end the run.", least=1
    )
    rank: int = setting(16, "Rank of each adapter.", least=1)
    alpha: float = setting(32.0, "Adapters are scaled by alpha / rank.", above=0.0)
    seed: int = same_as(LearnSettings, "seed")
    save_every: int = same_as(LearnSettings, "save_every")

    @property
    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must share, by name."""
        own = section_fields(type(self))
        return {one.name: getattr(self, one.name) for one in own if not one.facts.per_run}

    def fitted(self, context: int, *, demo: bool = False, stream: bool = True) -> Self:
        """Return the settings with nothing left open.

        Args:
            context: tokens that the decoder reads.
            demo: whether it is the embedded one.
            stream: whether the streams of the two decoders can be compared.

        Raises:
            DispfxError: if they cannot, and a weight was chosen for that.
        """
        steps = self.steps or _STEPS[self.train][demo]
        stream = stream and self.train != "lora"
        if self.stream_weight and not stream:
            raise DispfxError(
                f"{option('stream_weight')} needs the residual stream of both decoders, and "
                + ("adapters are trained without it" if self.train == "lora" else "this one is narrower"),
                hint=f"leave out {option('stream_weight')}",
            )
        weight = _STREAM_WEIGHT[self.train] if stream and self.stream_weight is None else self.stream_weight
        return replace(
            self,
            steps=steps,
            lr=self.lr or _LR[self.train][demo],
            stream_weight=weight or 0.0,
            batch_size=self.batch_size or _BATCH_SIZE[demo],
            seq_len=self.seq_len or min(_SEQ_LEN[demo], context),
            measure_every=self.measure_every or max(1, steps // _MEASUREMENTS),
        )


@dataclass(frozen=True)
class AfterwardsSettings(Section):
    """What is trained after pruning, to predict what the dense decoder predicts."""

    recover: Recover = setting(
        "none",
        "Train the pruned decoder: a scale per kept feature, or all weights. `dispfx recover` does the same "
        "to a folder.",
        common=True,
    )
    recover_steps: int | None = setting(
        None, "Optimizer steps of the recovery at most.", default=_STEPS_SHOWN, least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recover == "none" and self.recover_steps is not None:
            raise DispfxError(
                f"{option('recover_steps')} has no effect: nothing is trained after pruning",
                hint=f"add {option('recover', 'weights')} or {option('recover', 'scales')}, or leave it out",
            )

    @property
    def recovery(self) -> RecoverySettings | None:
        """How the pruned decoder is trained, if it is."""
        if self.recover == "none":
            return None
        return RecoverySettings(train=self.recover, steps=self.recover_steps)  # type: ignore[arg-type]
