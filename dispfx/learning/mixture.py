"""Several texts, each with a share of the sequences to learn from.

The index of a sequence determines its text, so that a resumed run reads the same sequences as an
uninterrupted run.  A pattern of texts repeats: weights 2 and 1 give the pattern a b a, so text b has every
third sequence.  Within a text, `TokenBatches` draws the sequence, so every window is read once before one is
read twice.

Legend: B batch, T tokens of a sequence.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.learning.text import HELD_OUT_SHARE, TokenBatches
from dispfx.settings.learning_settings import seed_for

_SMALLEST_SHARE = Fraction(1, 1000)
_LONGEST_PATTERN = 10_000


@dataclass(frozen=True, eq=False)
class Place:
    """The position of a sequence: its text, and the number of earlier sequences of that text."""

    part: int
    number: int


@dataclass(eq=False)
class Mixture:
    """Batches of several texts.

    Args:
        parts: batches of one sequence, each part with its own held-out text, which may be empty.
        weights: one per part; only their ratios count.
        batch_size: B.
    """

    parts: Sequence[TokenBatches]
    weights: Sequence[float]
    batch_size: int
    _quotas: list[int] = field(init=False, repr=False)
    _pattern: list[Place] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay out the parts.

        Raises:
            DataError: if there is not one positive weight per part, a share is below 1 in 1,000, or the parts
                have different sequence lengths.
        """
        if len({part.seq_len for part in self.parts}) != 1 or any(p.batch_size != 1 for p in self.parts):
            raise DataError("the parts of a mixture must be cut into single sequences of one length")
        self._quotas = quotas(self.weights, len(self.parts))
        self._pattern = _spread(self._quotas)

    @staticmethod
    def of(
        texts: Sequence[Tensor],
        weights: Sequence[float],
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        held_out_share: float = HELD_OUT_SHARE,
    ) -> "Mixture":
        """Return batches of several vectors of token ids; the last share of each is held out.

        Raises:
            DataError: as for `Mixture` and `TokenBatches`.
        """
        parts = [
            TokenBatches.split(
                text,
                seq_len=seq_len,
                batch_size=1,
                seed=seed_for(seed, f"part {index}"),
                held_out_share=held_out_share,
            )
            for index, text in enumerate(texts)
        ]
        return Mixture(parts, weights, batch_size)

    @property
    def seq_len(self) -> int:
        """T."""
        return self.parts[0].seq_len

    @property
    def digest(self) -> str:
        """Identify the texts, their order and their shares."""
        named = [f"{quota}:{part.digest}" for quota, part in zip(self._quotas, self.parts, strict=True)]
        return hashlib.sha256("|".join(named).encode()).hexdigest()[:16]

    def place(self, position: int) -> Place:
        """Return where sequence `position` is, counted from 0 without end."""
        cycle, index = divmod(position, len(self._pattern))
        found = self._pattern[index]
        return Place(found.part, cycle * self._quotas[found.part] + found.number)

    def batch(self, index: int) -> Tensor:
        """Return batch `index`, counted from 0 without end, as ids_BT int64 on the CPU."""
        places = [self.place(index * self.batch_size + row) for row in range(self.batch_size)]
        return torch.cat([self.parts[place.part].batch(place.number) for place in places])

    def held_out_batches(self, most: int) -> list[Tensor]:
        """Return up to `most` batches (1, T) of held-out text, in the shares of the texts.

        If one text has none left, the remaining texts continue.
        """
        found = [part.held_out_batches(most) for part in self.parts]
        chosen: list[Tensor] = []
        position = 0
        while len(chosen) < min(most, sum(map(len, found))):
            place = self.place(position)
            chosen += found[place.part][place.number : place.number + 1]
            position += 1
        return chosen


def quotas(weights: Sequence[float], parts: int) -> list[int]:
    """Return the number of sequences of each text in a pattern.

    The shares are exact if their common denominator is at most 10,000, otherwise within 1 in 10,000.

    Raises:
        DataError: if there is not one positive weight per text, or a share is below 1 in 1,000.
    """
    if len(weights) != parts:
        raise DataError(f"one weight per text is needed, but there are {len(weights)} for {parts}")
    if not all(0.0 < weight < math.inf for weight in weights):
        raise DataError(f"weights must be positive numbers, found {', '.join(map(str, weights))}")
    # In fractions, because sums of the largest floats overflow, and 1/3 is no float.
    exact = _shares([Fraction(weight) for weight in weights])
    shares = _shares([share.limit_denominator(10**6) for share in exact])
    if min(shares) < _SMALLEST_SHARE:
        raise DataError(
            f"every text must get one sequence in a thousand or more, and the weights "
            f"{', '.join(map(str, weights))} give one {float(min(exact)):.2g}",
            hint="leave that text out, or give it more weight",
        )
    length = min(math.lcm(*(share.denominator for share in shares)), _LONGEST_PATTERN)
    return _rounded([share * length for share in shares], length)


def _shares(weights: Sequence[Fraction]) -> list[Fraction]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _rounded(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Round `wanted` to integers with that total, by the largest remainder method."""
    found = [math.floor(number) for number in wanted]
    by_rest = sorted(range(len(wanted)), key=lambda index: (found[index] - wanted[index], index))
    for index in by_rest[: total - sum(found)]:
        found[index] += 1
    return found


def _spread(quota: Sequence[int]) -> list[Place]:
    """Return the pattern: every prefix of it is as close as possible to the shares."""
    total = sum(quota)
    given = [0] * len(quota)
    pattern = []
    for index in range(1, total + 1):
        part = max(range(len(quota)), key=lambda one: (quota[one] * index - given[one] * total, -one))
        pattern.append(Place(part, given[part]))
        given[part] += 1
    return pattern
