"""Settings made to suit a decoder, where nobody chose them (`LearnSettings.adaptable`).

    what a user chose → sequences that the decoder reads → a batch for all processes → masks that it can take

The batch follows the sequences, so that a step has about as many tokens, and the masks follow the batch.
"""

from collections.abc import Callable
from dataclasses import replace

from dispfx.analysis.lookups import longest_text
from dispfx.ir.ops import is_grouped
from dispfx.ir.program import Program
from dispfx.settings.learning_settings import LearnSettings

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
    """Return the settings as a decoder and the processes of a run can take them, where nobody chose others.

    1. Sequences are no longer than the decoder reads: the least of `context`, of what its config named when
       it was captured, of what the tables of positions in its graph hold, and of where it raises.  A batch
       gets so many more of them that its tokens are about as many.  All limits count at once: one by one
       would round twice.
    2. The batch becomes one that all processes share evenly.
    3. Experts that take tokens in sorted runs get one mask a batch.

    What is not known yet counts for nothing.  Before a decoder is captured, give its `context` alone; behind
    it, begin with the same settings again and not with what came of them.

    Args:
        context: tokens that the decoder reads, as far as is known without its graph.
        program: its graph.
        ranks: processes of the run.
        note: told what became shorter, or fewer.
    """
    limits = [settings.seq_len, *([] if context is None else [context])]
    if program is not None:
        limits += [longest_text(program, settings.seq_len), program.context or settings.seq_len]
        if program.lengths.limit:
            limits.append(program.lengths.within(settings.seq_len))
    found = settings_among(ranks, _within(min(limits), settings, note))
    return found if program is None else settings_for(program, found, note)


def settings_of(program: Program, settings: LearnSettings) -> LearnSettings:
    """Return the settings with which a captured decoder would be learned, by one process."""
    return fitted_settings(settings, program=program)


def settings_among(ranks: int, settings: LearnSettings) -> LearnSettings:
    """Return the settings with a batch that so many processes can share, where nobody asked for another."""
    if "batch_size" not in settings.adaptable:
        return settings
    return _of_batch(settings, -(-settings.batch_size // ranks) * ranks)


def settings_for(program: Program, settings: LearnSettings, note: Note) -> LearnSettings:
    """Return the settings with one mask a batch where nobody asked for more and the decoder cannot take them.

    Experts that take tokens in sorted runs see the tokens of all sequences of a batch mixed.
    """
    if "samples" not in settings.adaptable or settings.samples == 1:
        return settings
    if not any(map(is_grouped, program.graph_module.graph.nodes)):
        return settings
    note("one mask a batch: the experts of this decoder take the tokens of all its sequences together")
    return replace(settings, samples=1)


def _within(longest: int, settings: LearnSettings, note: Note) -> LearnSettings:
    """Return the settings with sequences of so many tokens at most, where nobody asked for longer ones."""
    if "seq_len" not in settings.adaptable or settings.seq_len <= longest:
        return settings
    times = round(settings.seq_len / longest) if "batch_size" in settings.adaptable else 1
    note(f"sequences of {longest} tokens: the decoder reads no longer ones")
    return _of_batch(replace(settings, seq_len=longest), settings.batch_size * times)


def _of_batch(settings: LearnSettings, batch_size: int) -> LearnSettings:
    """Return the settings with another batch, and with a mask for each of its sequences where it had one."""
    follows = "samples" in settings.adaptable and settings.samples > 1
    return replace(settings, batch_size=batch_size, samples=batch_size if follows else settings.samples)
