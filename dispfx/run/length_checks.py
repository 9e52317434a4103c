"""Check a decoder's graph at the longest sequences of a run, before learning starts.

--seq-len, window of perplexity  →  inside `Program.lengths`?  →  graph = decoder at that length, and at the
longest one that config or graph claim?
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from dispfx.analysis.lookups import longest_text
from dispfx.capturing.module_capture import compare_at, module_logits, token_ids
from dispfx.errors import CaptureError, memory_shortage
from dispfx.ir.lengths import Lengths
from dispfx.ir.program import Program
from dispfx.settings.learning_settings import LearnSettings
from dispfx.settings.verb_settings import LONGEST_CONTEXT
from dispfx.source import Source
from dispfx.source.experts import experts_as, has_choice_of_experts
from dispfx.source.source import context_of, named_context

# Where neither config nor graph names a length, and the run's own are shorter.
_UNNAMED = (256, 128, 64, 32)


def window_of(source: Source, program: Program, seq_len: int | None) -> int:
    """Return the window of perplexity: no longer than what the decoder reads, and the graph holds for.

    Args:
        seq_len: of learning, which a decoder whose config names no length has run at; None without learning.
    """
    named = _named_window(source, seq_len)
    hold_to_readable(source, program, named)
    return longest_text(program, program.lengths.within(named))


def hold_to_readable(source: Source, program: Program, tokens: int) -> None:
    """Narrow the program's lengths to those that the decoder runs on, where no config names its context.

    Args:
        tokens: the longest sequence that may be needed.
    """
    if named_context(source.config) is not None or not program.measured:
        return
    tokens = longest_text(program, program.lengths.within(tokens))
    known = max(shape[1] for shape in program.identity)
    if tokens <= known or _stop(source, program, tokens) is None:
        return
    fails = partial(_stop, source, program)
    most = known + bisect_left(range(known + 1, tokens), True, key=lambda one: fails(one) is not None)
    end = fails(most + 1)
    where = None if end is None else end.where
    program.hold_to(replace(program.lengths, most=most, end="limit", where=where))


def _stop(source: Source, program: Program, tokens: int) -> CaptureError | None:
    """Return what a decoder raises for a sequence of so many tokens, or None if it runs."""
    model = source.model
    try:
        with torch.no_grad():
            module_logits(model, token_ids(model, program.known_tokens, (1, tokens)))
    except CaptureError as error:
        return None if memory_shortage(error) is not None else error
    return None


def require_lengths(
    source: Source, program: Program, settings: LearnSettings, note: Callable[[str], None], *, measured: bool
) -> None:
    """Require that the graph holds at the longest sequence of a run, and compare it with the decoder there.

    If the user chose --seq-len, perplexity windows are shortened to the valid range, with a note.

    Args:
        note: called if windows became shorter, or memory does not suffice for a length.
        measured: whether perplexity is measured.

    Raises:
        CaptureError: if the decoder's arithmetic changes below that length, or its graph differs there.
        DataError: if the decoder does not read that many tokens.
    """
    longest = settings.seq_len
    if measured:
        named = _named_window(source, settings.seq_len)
        window = window_of(source, program, settings.seq_len)
        if window < named:
            if not program.lengths.limit and "seq_len" in settings.adaptable:
                program.lengths.require(named)
            note(f"perplexity in windows of {window:,} tokens: the graph holds for {program.lengths}")
        longest = max(longest, window)
    compare_lengths(source, program, longest, note)


def compare_lengths(source: Source, program: Program, tokens: int, note: Callable[[str], None]) -> None:
    """Compare graph and decoder at the longest sequence that is needed or claimed, and at two shorter ones.

    This finds conditions on the length that `torch.export` does not note.  The verification uses the longest
    sequence, too.

    Args:
        tokens: of the longest sequence of a run; 0 where it has none.
        note: called if memory does not suffice.

    Raises:
        CaptureError: if they differ.
    """
    if not program.measured:
        return
    longest = max(tokens, _claimed(source, program))
    known = max(shape[1] for shape in program.identity)
    for each in (*_between(longest), longest):
        if each > known and not _compared(source.model, program, each, listed=each == longest):
            note(f"the graph was not compared with the decoder at {each:,} tokens: not enough memory")
            return


def _claimed(source: Source, program: Program) -> int:
    """Return the longest sequence that config and graph claim, 2048 at most, or one that the decoder runs."""
    named = program.context or program.lengths.most
    if named is not None:
        tokens = longest_text(program, program.lengths.within(min(named, LONGEST_CONTEXT)))
        if _stop(source, program, tokens) is None:
            return tokens
        # A config may name positions that texts do not begin at.
    return next((tokens for tokens in _UNNAMED if _stop(source, program, tokens) is None), 0)


def _between(longest: int) -> tuple[int, int]:
    """Return two shorter lengths: a multiple of a power of two, unless the longest is one, and an odd one."""
    step = 64 if longest > 64 else 8
    most = longest if longest % step else 3 * longest // 4
    return (longest // 2 - 1) | 1, most // step * step


def _compared(model: nn.Module, program: Program, tokens: int, *, listed: bool) -> bool:
    """Compare graph and decoder at one length; return whether memory suffices."""
    try:
        with experts_as(model, "grouped"):
            compare_at(model, program, tokens, listed=listed)
    except (CaptureError, RuntimeError, MemoryError) as error:
        if memory_shortage(error) is not None:
            return False
        if not has_choice_of_experts(model):
            raise
        with experts_as(model, "batched"):
            compare_at(model, program, tokens, listed=listed)
    return True


def require_onnx_lengths(lengths: Lengths, context: int | None) -> None:
    """Require that an ONNX model would be correct at every length up to its decoder's context.

    An ONNX graph cannot reject a sequence that is too short or too long for it.

    Args:
        lengths: for which the graph holds.
        context: tokens that the decoder reads, where its config names them.

    Raises:
        CaptureError: if the decoder's arithmetic changes below that length.
    """
    if lengths.least > 1:
        raise CaptureError(
            f"an ONNX model would be wrong below {lengths.least:,} tokens: the decoder's arithmetic changes",
            where=lengths.where,
            hint="leave out ONNX; the checkpoint computes every length",
        )
    if lengths.wrong_beyond and (context is None or context not in lengths):
        raise CaptureError(
            f"an ONNX model would be wrong beyond {lengths.most:,} tokens: the decoder's arithmetic changes",
            where=lengths.where,
            hint="leave out ONNX; the checkpoint computes every length",
        )


def _named_window(source: Source, seq_len: int | None) -> int:
    named = context_of(source)
    return named if source.config is not None else seq_len or named
