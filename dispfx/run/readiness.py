"""Prepare a run, and report every error in its input before learning starts.

    settings, costs, text's files → room for the weights → decoder → text → capture
        → settings that suit the decoder → batches → room to learn → rehearsal of what comes after learning

Cheap checks come first: arguments before files, files before weights, text before the capture.
Nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dispfx.analysis.finite_weights import require_finite_weights, require_values
from dispfx.analysis.lookups import require_readable
from dispfx.compiler.programs import analyse, separate_documents
from dispfx.distributed.ranks import ALONE, Ranks
from dispfx.errors import DispfxError
from dispfx.ir.program import Program
from dispfx.learning.text import Batches
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import fitting_budget
from dispfx.plan.knots import Knots
from dispfx.plan.latency_table import latency_table
from dispfx.plan.plan import Plan
from dispfx.run.cached_bytes import confirmed_cache
from dispfx.run.decoder_files import require_writable
from dispfx.run.fitting import fitted_settings
from dispfx.run.learning_setup import device_of_learning
from dispfx.run.length_checks import hold_to_readable, require_lengths, require_onnx_lengths
from dispfx.run.mask_learning import LearningJob, require_one_method
from dispfx.run.opening import open_model
from dispfx.run.preflight import require_room_for_weights, require_room_to_learn, require_room_to_recover
from dispfx.run.rehearsal import rehearse
from dispfx.run.run_text import Text, TextChoice, open_text, require_tokens, separator_of
from dispfx.run.targets import export_of, require_ordinary
from dispfx.run.timed_stages import Stages
from dispfx.settings import ComputeSettings, LearnSettings, RunSettings
from dispfx.settings.sections import ALIGNMENT, BudgetSettings
from dispfx.source import Source
from dispfx.source.loading import require_own_call
from dispfx.source.source import context_of
from dispfx.source.transformers_classes import unknown_class
from dispfx.words.option_names import option
from dispfx.words.own_function import require_functions
from dispfx.words.preconditions import check_select


@dataclass(frozen=True, eq=False, kw_only=True)
class Ready:
    """The program to learn on, which may need another capture of the decoder than the rest of the run."""

    source: Source
    text: Text
    batches: Batches
    program: Program
    learned_on: Program
    settings: LearnSettings
    budget: Budget
    knots: Knots | None = None

    def job(self, compute: ComputeSettings, ranks: Ranks) -> LearningJob:
        """Return what masks are learned for."""
        return LearningJob(
            program=self.learned_on,
            text=self.batches,
            budget=self.budget,
            settings=self.settings,
            compute=compute,
            ranks=ranks,
            knots=self.knots,
        )


def ready_to_learn(
    settings: RunSettings, stages: Stages, *, ranks: Ranks = ALONE, copies: float = 1.0
) -> Ready:
    """Open decoder and text and analyse the decoder; nothing is written.

    Args:
        copies: minimum memory of the run, as a multiple of the weights.

    Raises:
        DispfxError: for everything in the input that cannot be used.
    """
    asked, export = settings.budget, settings.output.export
    chosen = TextChoice(settings.text)
    check_select(asked.select, constrained=settings.learning.constrained, costs=asked.costs is not None)
    chosen.require_data(settings.model.model)
    require_functions(asked.ratio_of, settings.learning.method, settings.learning.estimator)
    if asked.is_range:
        require_one_method(settings.learning, asked)
    asked = replace(asked, costs=latency_table(asked.costs))
    with stages("open"):
        chosen.check()
        require_room_for_weights(settings.placed_model, copies=copies)
        source = open_model(settings.placed_model)
        require_writable(export, source)
        fitted = partial(fitted_settings, settings.learning, context=context_of(source), ranks=ranks.size)
        learning = fitted()
        separator = separator_of(source) if learning.packing == "documents" else None
        text = open_text(source, chosen if separator is None else chosen.of_documents(source, separator))
    stages.say(text.notes)
    text.require_learnable()
    if source.config is not None or "seq_len" not in learning.adaptable:
        text.batches(learning)  # Otherwise the decoder's graph says how long its sequences may be.
    text.require_measurable()
    program = analysed(source, stages, asked, skip=asked.skip, longest=learning.seq_len)
    if asked.needs_cache:
        program.cache = confirmed_cache(program, source.model)
    # Widths suit the device that the result will run on.
    target = asked.target or device_of_learning(program, settings.compute).type
    budget = Budget.of_settings(asked, ALIGNMENT[target])
    budget = fitting_budget(budget, program, constrained=settings.learning.constrained)
    if export == "onnx":
        require_onnx_lengths(program.lengths, program.context)
    if asked.select == "before-norm" and export == "dense":
        if "attention-values" in asked.sites:
            raise DispfxError(
                f"an ordinary checkpoint ({option('export', 'dense')}) has one size for keys and values, and "
                f"{option('sites', 'attention-values')} makes values smaller",
                hint="leave out one of the two",
            )
        with stages("verify"):
            require_ordinary(source, program, budget)
    require_tokens(source, text, program.text_tokens)
    learned_on = program
    if separator is not None:
        with stages("capture documents"):
            learned_on = separate_documents(
                source.model,
                program,
                separator,
                skip=asked.skip,
                select=asked.select,
                sites=asked.sites,
                longest=learning.seq_len,
            )
        learned_on.cache = program.cache
    hold_to_readable(source, learned_on, learning.seq_len)
    learning = fitted(program=learned_on, note=stages.observer.note)
    require_readable(learned_on, learning.seq_len)
    with stages("check lengths"):
        require_lengths(source, program, learning, stages.observer.note, measured=text.measure is not None)
    batches = text.batches(learning)
    require_room_to_learn(learned_on, learning, settings.compute, ranks)
    recovery = settings.recovery
    if recovery is not None and recovery.train == "weights":
        kept = round(budget.keep * program.size)
        require_room_to_recover(kept, program.dtype, program.device)
    with stages("rehearse"):
        rehearse(source, program, budget, export_of(export, source), recovery)
    return Ready(
        source=source,
        text=text,
        batches=batches,
        program=program,
        learned_on=learned_on,
        settings=learning,
        budget=budget,
        knots=Knots.of_range(*asked.ratios) if asked.is_range else None,
    )


def analysed(
    source: Source,
    stages: Stages,
    asked: BudgetSettings | Plan,
    *,
    skip: Sequence[str] = (),
    longest: int = 0,
) -> Program:
    """Return the program of a decoder, captured as a timed stage.

    Args:
        asked: names the sites to find.
        skip, longest: as for `analyse`.
    """
    with stages("capture"):
        require_values(source.model.named_parameters())
        require_finite_weights(source.model)
        require_own_call(source)
        program = analyse(source.model, skip=skip, select=asked.select, sites=asked.sites, longest=longest)
    stages.observer.found(program)
    if reason := unknown_class(source.model):
        stages.observer.note(f"transformers cannot hold this decoder ({reason}); dispfx.load opens its graph")
    return program
