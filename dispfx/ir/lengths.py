"""The sequence lengths for which a graph computes what its decoder computes.

A branch such as `if tokens > 24` is taken once, while the decoder is traced, and the graph keeps that side of
it.  `dispfx.valid_lengths` finds where the graph stops to hold; `Lengths` is what a program knows of it.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from dispfx.errors import CaptureError, DataError, DispfxError
from dispfx.words.option_names import option

End = Literal["changes", "stops", "limit"]


@dataclass(frozen=True)
class Lengths:
    """A range of sequence lengths, in tokens.

    Args:
        least: the shortest.
        most: the longest; None where no end was found.
        end: what is beyond: the arithmetic `changes` and the graph would be wrong; the graph `stops` with an
            error and the decoder does not; or it is a `limit` of the decoder itself.  None without an end.
        where: module path and source line at which the range ends.
    """

    least: int = 1
    most: int | None = None
    end: End | None = None
    where: str | None = None

    def __contains__(self, tokens: int) -> bool:
        # In this order a length that torch traces gets no second guard where there is no end.
        return tokens >= self.least and (self.most is None or tokens <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return "any length" if self.least == 1 else f"{self.least:,} tokens or more"
        return f"{self.least:,} to {self.most:,} tokens"

    @property
    def limit(self) -> bool:
        """Whether the decoder itself reads no longer sequences."""
        return self.end == "limit"

    @property
    def wrong_beyond(self) -> bool:
        """Whether the graph computes longer sequences, and wrongly."""
        return self.end == "changes"

    def within(self, tokens: int) -> int:
        """Return so many tokens, or the most that there may be."""
        return tokens if self.most is None else min(tokens, self.most)

    def require(self, tokens: int, hint: str | None = None) -> None:
        """Pass if a sequence of so many tokens is in the range.

        Args:
            tokens: of the sequence.
            hint: what to do, where that is not to use other sequences.

        Raises:
            DataError: if the decoder does not read that many.
            CaptureError: if its arithmetic changes before that.
        """
        if tokens not in self:
            raise self._outside(tokens, hint)

    def _outside(self, tokens: int, hint: str | None) -> DispfxError:
        if tokens < self.least:
            problem = f"below {self.least:,} tokens the decoder computes otherwise than its graph"
            hint = hint or f"use sequences of {self.least:,} tokens or more"
            return CaptureError(f"{problem}, and a sequence has {tokens:,}", where=self.where, hint=hint)
        assert self.most is not None
        hint = (
            hint or f"use sequences of {self.most:,} tokens or less, as with {option('seq_len', self.most)}"
        )
        if self.limit:
            problem = f"this decoder reads at most {self.most:,} tokens, and a sequence has {tokens:,}"
            return DataError(problem, where=self.where, hint=hint)
        if self.end == "stops":
            problem = f"the decoder's graph ends at {self.most:,} tokens, and a sequence has {tokens:,}"
            return CaptureError(problem, where=self.where, hint=hint)
        return CaptureError(
            f"the decoder's arithmetic changes at {self.most + 1:,} tokens, and a sequence has {tokens:,}; "
            f"its graph holds for {self}",
            where=self.where,
            hint=hint,
        )


@dataclass(frozen=True)
class LengthCheck:
    """A forward hook that lets no sequence pass for which a graph does not hold.

    Args:
        lengths: for which it holds.
        index: of the input (B, T) that counts the tokens: ids, or the mask of new and cached ones.
    """

    lengths: Lengths
    index: int = 0

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Raise as `Lengths.require`."""
        if len(inputs) > self.index and isinstance(inputs[self.index], Tensor):
            self.lengths.require(inputs[self.index].shape[1])


def hold_to(module: nn.Module, lengths: Lengths, index: int = 0) -> None:
    """Let a module raise for sequences outside of a range, and of no other range that it was held to."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, LengthCheck):
            del module._forward_pre_hooks[key]
    if lengths.least > 1 or lengths.most is not None:
        # First, for an exported program has a check of torch's own.
        module.register_forward_pre_hook(LengthCheck(lengths, index), prepend=True)


def held_to(module: nn.Module) -> Lengths:
    """Return the range of lengths that a module accepts."""
    checks = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, LengthCheck))
    return next((check.lengths for check in checks), Lengths())
