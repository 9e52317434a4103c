"""What gets a run ready: everything that can be wrong is told before hours are spent on learning.

    settings, costs, text's files → room for the weights → decoder → text → capture
        → settings that suit the decoder → batches → room to learn

What is known sooner is asked sooner: words before files, files before weights, text before the capture.
Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dispfx.api.fitting import fitted_settings
from dispfx.api.length_checks import require_lengths, require_onnx_lengths
from dispfx.api.opening import Opening, context_of, learn_settings
from dispfx.api.ordinary import require_ordinary
from dispfx.api.preflight import require_room_for_weights, require_room_to_learn
from dispfx.api.programs import analyse, apart
from dispfx.api.stages import Stages
from dispfx.api.text import Text, TextChoice, open_text, require_tokens, separator_of
from dispfx.api.training import device_of_learning
from dispfx.api.writing import check_export, require_writable
from dispfx.choices import check_choices, option, require_choice
from dispfx.finite_weights import require_finite_weights
from dispfx.huggingface.classes import unknown_class
from dispfx.ir.costs import CostTable, read_costs
from dispfx.ir.lookups import require_readable
from dispfx.ir.plan import BudgetOf
from dispfx.ir.program import Program
from dispfx.ir.sites import Select
from dispfx.learning.settings import LearnSettings
from dispfx.learning.text import Batches
from dispfx.preconditions import check_select
from dispfx.ranks import ALONE, Ranks
from dispfx.source import Source
from dispfx.training.preparation import Compute

ALIGNMENT = {"cuda": 16, "cpu": 8}


@dataclass(frozen=True)
class Learning:
    """How a plan is learned; the fields are those of `compile`."""

    ratio: float
    ratio_of: BudgetOf = "blocks"
    settings: LearnSettings | None = None
    align: int | None = None
    skip: tuple[str, ...] = ()
    target: str | None = None
    resume: bool = False
    compute: Compute | None = None
    costs: str | Path | None = None
    ranks: Ranks | None = None
    export: str | None = None
    select: Select = "after-norm"

    def __post_init__(self) -> None:
        """Check every choice.

        Raises:
            DispfxError: if a name is unknown.
        """
        check_choices(self, option)
        check_export(self.export)
        if self.target is not None:
            require_choice(ALIGNMENT, self.target, "--target")

    def alignment(self, program: Program) -> int:
        """Return what widths become multiples of."""
        return self.align or ALIGNMENT[self.target or device_of_learning(program, self.compute).type]


@dataclass(frozen=True, eq=False)
class Ready:
    """What learning starts from; it may need another capture of the decoder than the rest."""

    source: Source
    text: Text
    batches: Batches
    program: Program
    learned_on: Program
    settings: LearnSettings
    costs: CostTable | None


def ready_to_learn(
    opening: Opening, chosen: TextChoice, how: Learning, stages: Stages, *, copies: float = 1.0
) -> Ready:
    """Open decoder and text and analyse the decoder; nothing is written.

    Args:
        copies: how many times as large as the weights the run is at the least.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    chosen_settings = how.settings or learn_settings(opening.model)
    check_select(how.select, constrained=chosen_settings.constrained, costs=how.costs is not None)
    chosen.require_data(opening.model)
    costs = None if how.costs is None else read_costs(how.costs)
    with stages("open"):
        chosen.check()
        require_room_for_weights(opening, copies=copies)
        source = opening.open()
        require_writable(how.export, source)
        fitted = partial(
            fitted_settings, chosen_settings, context=context_of(source), ranks=(how.ranks or ALONE).size
        )
        settings = fitted()
        separator = separator_of(source) if settings.packing == "documents" else None
        text = open_text(source, chosen if separator is None else chosen.of_documents(source, separator))
    stages.say(text.notes)
    text.require_learnable()
    if source.config is not None or "seq_len" not in settings.adaptable:
        text.batches(settings)  # Otherwise the decoder's graph says how long its sequences may be.
    text.require_measurable()
    program = analysed(source, stages, how.skip, how.select, settings.seq_len)
    if how.export == "onnx":
        require_onnx_lengths(program.lengths, program.context)
    if how.select == "before-norm" and how.export == "dense":
        with stages("verify"):
            require_ordinary(source, program, how.ratio, how.ratio_of, how.alignment(program))
    require_tokens(source, text, program.vocabulary_size)
    learned_on = program
    if separator is not None:
        with stages("capture documents"):
            learned_on = apart(
                source.model, program, separator, skip=how.skip, select=how.select, longest=settings.seq_len
            )
    settings = fitted(program=learned_on, note=stages.observer.note)
    require_readable(learned_on, settings.seq_len)
    with stages("check lengths"):
        require_lengths(source, program, settings, stages.observer.note, measured=text.measure is not None)
    batches = text.batches(settings)
    require_room_to_learn(learned_on, settings, how.compute, how.ranks)
    return Ready(source, text, batches, program, learned_on, settings, costs)


def analysed(
    source: Source, stages: Stages, skip: Sequence[str], select: Select, longest: int = 0
) -> Program:
    """Return the program of a decoder, as a stage that is told; `longest` as for `analyse`."""
    with stages("capture"):
        require_finite_weights(source.model)
        program = analyse(source.model, skip=skip, select=select, longest=longest)
    stages.observer.found(program)
    if reason := unknown_class(source.model):
        stages.observer.note(f"transformers cannot hold this decoder ({reason}); dispfx.load opens its graph")
    return program
