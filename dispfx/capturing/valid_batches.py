"""Does a graph hold for any number of sequences in a batch?

A branch such as `if len(ids) > 4` or `if len(ids) == 1` is taken once, while the decoder is traced, and the
graph keeps that side of it.  Where the sides differ, the logits of a text depend on its batch, and such a
decoder is refused.

1. One sequence is run, because torch takes no size for one that may be 1.
2. Conditions on the size of the batch are tried as those on the length (`dispfx.capturing.valid_lengths`).
3. Batches of more than `LONGEST_RUN` tokens are not run: a condition of the decoder's own that only they
   break, such as `sequences * tokens > 8192`, is refused untried.
"""

from collections.abc import Sequence
from dataclasses import replace

from dispfx.capturing.valid_lengths import LONGEST_RUN, Condition, Trial, range_above
from dispfx.errors import CaptureError


def require_any_batch(conditions: Sequence[Condition], traced: tuple[int, int], trial: Trial) -> None:
    """Pass if decoder and graph agree for every number of sequences.

    Args:
        conditions: on that number, which hold in the traced batch.
        traced: (B, T) of that batch.
        trial: the decoder and its graph, tried at a number of sequences.

    Raises:
        CaptureError: otherwise, with the line that asks.
    """
    sequences, tokens = traced
    if trial.compared is None:
        return
    if trial.answer(1).kind not in ("same", "limit"):
        raise _refusal("one sequence", None)
    most = LONGEST_RUN // tokens
    ends = {one: one.broken_after(sequences) or 0 for one in conditions}
    found = range_above([one for one in conditions if ends[one] <= most], sequences, _up_to(most, trial))
    if found.most is not None and not found.limit:
        raise _refusal(f"{found.most + 1} sequences at once", found.where)
    for one in conditions:
        if ends[one] > most and one.file is not None:
            raise CaptureError(
                f"the decoder asks for batches of {ends[one]:,} sequences of {tokens} tokens and more, "
                "which are too large to be tried",
                where=trial.place_of(one, sequences),
                hint="compute every sequence in the same way, however many there are",
            )


def _up_to(most: int, trial: Trial) -> Trial:
    """Return a trial that runs no larger batches (rule 3)."""
    run, compared = trial.run, trial.compared
    assert compared is not None
    return replace(
        trial, run=lambda size: run(min(size, most)), compared=lambda size: compared(min(size, most))
    )


def _refusal(batch: str, where: str | None) -> CaptureError:
    return CaptureError(
        f"the decoder computes {batch} otherwise than its graph, traced with another batch",
        where=where,
        hint="compute every sequence in the same way, however many there are",
    )
