"""Adapt settings that the user did not choose to a decoder (`LearnSettings.adaptable`).

    what a user chose → sequences that the decoder reads → a batch for all processes → masks that it can take

The batch follows the sequences, so that a step has about as many tokens, and the masks follow the batch.
"""

from collections.abc import Callable
from dataclasses import replace

from dispfx.analysis.lookups import longest_text
from dispfx.ir.ops import is_grouped
from dispfx.ir.program import Program, require_program
from dispfx.settings.learning_settings import LearnSettings
from dispfx.words.given import require_given

Note = Callable[[str], None]


def _silent(note: str) -> None:
    return None


def fitted_settings(
    settings: LearnSettings,
    *,
    context: int | None = None,
    program: Program | None = None,
    ranks: int = 1,
    note: Note = _silent,
) -> LearnSettings:
    """Return the settings adapted to a decoder and the processes of a run, unless the user chose them.

    1. Sequences are no longer than the decoder reads: the least of `context`, of what its config named when
       it was captured, of what the tables of positions in its graph hold, and of where it raises.  A batch
       gets more of them, so that it has about as many tokens.  All limits are applied at once, because
       one by one would round twice.
    2. The batch becomes a multiple of the number of processes.
    3. Experts that take tokens in sorted runs get one mask per batch.

    Unknown limits are ignored.  Before a decoder is captured, pass only its `context`; after it, pass
    the original settings again, not the adapted ones.

    Args:
        context: tokens that the decoder reads, as far as is known without its graph.
        program: its graph.
        ranks: processes of the run.
        note: called with every reduction.
    """
    limits = [settings.seq_len, *([] if context is None else [context])]
    if program is not None:
        limits += [longest_text(program, settings.seq_len), program.context or settings.seq_len]
        if program.lengths.limit:
            limits.append(program.lengths.within(settings.seq_len))
    found = settings_among(ranks, _within(min(limits), settings, note))
    return found if program is None else settings_for(program, found, note)


def settings_of(program: Program, settings: LearnSettings) -> LearnSettings:
    """Return the settings for learning on a captured decoder with one process."""
    require_program(program)
    require_given(settings, LearnSettings, "dispfx.api.learn_settings(model) returns one")
    return fitted_settings(settings, program=program)


def settings_among(ranks: int, settings: LearnSettings) -> LearnSettings:
    """Return the settings with a batch that `ranks` processes can share, unless the user chose the batch."""
    if "batch_size" not in settings.adaptable:
        return settings
    return _of_batch(settings, -(-settings.batch_size // ranks) * ranks)


def settings_for(program: Program, settings: LearnSettings, note: Note) -> LearnSettings:
    """Return the settings with one mask per batch if the decoder needs that, unless the user chose more.

    Experts that take tokens in sorted runs see the tokens of all sequences of a batch mixed.
    """
    if "samples" not in settings.adaptable or settings.samples == 1:
        return settings
    if not any(map(is_grouped, program.graph_module.graph.nodes)):
        return settings
    note("one mask per batch: the experts of this decoder take the tokens of all sequences together")
    return replace(settings, samples=1)


def _within(longest: int, settings: LearnSettings, note: Note) -> LearnSettings:
    """Return the settings with sequences of at most `longest` tokens, unless the user chose longer ones."""
    if "seq_len" not in settings.adaptable or settings.seq_len <= longest:
        return settings
    times = round(settings.seq_len / longest) if "batch_size" in settings.adaptable else 1
    found = _of_batch(replace(settings, seq_len=longest), settings.batch_size * times)
    note(f"batches of {found.batch_size} × {longest} tokens: the decoder does not read longer sequences")
    return found


def _of_batch(settings: LearnSettings, batch_size: int) -> LearnSettings:
    """Return the settings with another batch; one mask per sequence stays one mask per sequence."""
    follows = "samples" in settings.adaptable and settings.samples > 1
    return replace(settings, batch_size=batch_size, samples=batch_size if follows else settings.samples)
