"""Several texts, each with its share of the sequences that are learned from.

Which text a sequence is from follows from its number alone, so that a resumed run reads exactly what the
uninterrupted run would have read: a pattern of texts is repeated without end.  Weights 2 and 1 give the
pattern a b a: text b has every third sequence.  Within its text a sequence is drawn as `TokenBatches` draws
it, so every window of a text is read once before one is read twice.

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
    """Where a sequence is: of which text, and how many of that text come before it."""

    part: int
    number: int


@dataclass(eq=False)
class Mixture:
    """Batches of several texts.

    Args:
        parts: one sequence a batch, each with its own held-out text, possibly none.
        weights: one a part; only their ratios count.
        batch_size: B.
    """

    parts: Sequence[TokenBatches]
    weights: Sequence[float]
    batch_size: int
    _quotas: list[int] = field(init=False, repr=False)
    _pattern: list[Place] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay the parts out.

        Raises:
            DataError: if there is not one positive weight a part, a share is below one in a thousand, or
                the parts are not cut alike.
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
        """Return up to `most` batches (1, T) of held-out text, in the shares that are learned from.

        Where one text has none left, the others go on.
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
    """Return how many sequences of a repeated pattern each text gets.

    The shares are exact where their common denominator is at most 10,000, and else within 1 in 10,000.

    Raises:
        DataError: if there is not one positive weight a text, or a share is below one in a thousand.
    """
    if len(weights) != parts:
        raise DataError(f"one weight a text is needed, and there are {len(weights)} for {parts}")
    if not all(0.0 < weight < math.inf for weight in weights):
        raise DataError(f"a weight must be a positive number, found {', '.join(map(str, weights))}")
    exact = [Fraction(weight).limit_denominator(10**6) for weight in weights]
    total = sum(exact)
    shares = [weight / total if total else Fraction(0) for weight in exact]
    if min(shares) < _SMALLEST_SHARE:
        raise DataError(
            f"every text must get one sequence in a thousand or more, and the weights "
            f"{', '.join(map(str, weights))} give one {float(min(shares)):.2g}",
            hint="leave that text out, or give it more weight",
        )
    length = min(math.lcm(*(share.denominator for share in shares)), _LONGEST_PATTERN)
    return _rounded([share * length for share in shares], length)


def _rounded(wanted: Sequence[Fraction], total: int) -> list[int]:
    """Return whole numbers near `wanted` of that total; the largest rests are rounded up."""
    found = [math.floor(number) for number in wanted]
    by_rest = sorted(range(len(wanted)), key=lambda index: (found[index] - wanted[index], index))
    for index in by_rest[: total - sum(found)]:
        found[index] += 1
    return found


def _spread(quota: Sequence[int]) -> list[Place]:
    """Return the pattern: after any number of sequences, each text is as near to its share as can be."""
    total = sum(quota)
    given = [0] * len(quota)
    pattern = []
    for index in range(1, total + 1):
        part = max(range(len(quota)), key=lambda one: (quota[one] * index - given[one] * total, -one))
        pattern.append(Place(part, given[part]))
        given[part] += 1
    return pattern
