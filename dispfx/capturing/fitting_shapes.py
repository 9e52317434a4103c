"""The shapes at which a decoder is traced and compared: two primes, or smaller ones where it reads less."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dispfx.errors import CaptureError
from dispfx.ir.lengths import Lengths

TRACED_SHAPE = (3, 13)
OTHER_SHAPE = (2, 17)
# For decoders that read at least so many tokens, where they do not read 17.
_SMALLER = {13: (TRACED_SHAPE, (2, 11)), 8: ((3, 7), (2, 5))}


@dataclass(frozen=True)
class Shapes:
    """Shapes (batch, tokens) of token ids.

    Args:
        traced: the graph is traced at this one.
        other: and compared with the decoder at this one too.
        limit: how many tokens the decoder reads, where that is less than 17.
    """

    traced: tuple[int, int] = TRACED_SHAPE
    other: tuple[int, int] = OTHER_SHAPE
    limit: Lengths | None = None

    def within(self, tokens: int) -> int:
        """Return so many tokens, or the most that the decoder reads."""
        return tokens if self.limit is None else self.limit.within(tokens)

    def narrowed(self, found: Lengths) -> Lengths:
        """Return the range for which a graph holds, which the decoder's own limit may end."""
        if self.limit is None or found.most in range(self.limit.most or 0):
            return found
        return replace(self.limit, least=found.least)


def fitting_shapes(run: Callable[[int], None]) -> Shapes:
    """Return shapes that a decoder reads.

    Args:
        run: runs it on so many tokens; raises CaptureError where it cannot.

    Raises:
        CaptureError: if it reads fewer than 8 tokens, or cannot run at all.
    """
    usual = OTHER_SHAPE[1]
    try:
        run(usual)
    except CaptureError as error:
        most = next((tokens for tokens in range(usual - 1, 0, -1) if _runs(run, tokens)), 0)
        least = next((least for least in _SMALLER if most >= least), None)
        if most < 2:  # one token may run by chance, where ids are wrong
            raise
        if least is None:
            raise CaptureError(
                f"this decoder reads at most {most} tokens, and a capture takes {min(_SMALLER)}",
                where=error.where,
            ) from error
        traced, other = _SMALLER[least]
        return Shapes(traced, other, Lengths(most=most, end="limit", where=error.where))
    return Shapes()


def _runs(run: Callable[[int], None], tokens: int) -> bool:
    try:
        run(tokens)
    except CaptureError:
        return False
    return True
