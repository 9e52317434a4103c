"""What a decoder must fit into, as a user writes it.

    size: 6 GB                 the weights of the folder
    size: 60%                  … as a share of the dense decoder's
    memory 8x4096: 12 GB       weights, and the KV cache of 8 sequences of 4096 tokens

A name, for memory a batch and a length, a colon, and a number with its unit.  Units are B, kB, MB, GB and TB
(powers of 1000), KiB, MiB, GiB and TiB (powers of 1024), and %.
"""

import re
from dataclasses import dataclass
from typing import Literal

from dispfx.errors import BudgetError
from dispfx.words.option_names import option

ConstraintKind = Literal["size", "memory"]
EXAMPLES = ("size: 6 GB", "size: 60%", "memory 8x4096: 12 GB")

_FORM = re.compile(
    r"(?P<kind>[a-z]+)(?: *(?P<batch>\d+) *x *(?P<tokens>\d+))? *: *"
    r"(?P<number>\d+(?:\.\d+)?) *(?P<unit>[a-z]+|%)",
    re.IGNORECASE | re.ASCII,
)
_UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_MOST_TOKENS = 2**40


@dataclass(frozen=True)
class Constraint:
    """An upper limit.

    Args:
        text: as it was written, with single spaces.
        kind: what is limited.
        tokens: number of cached tokens, of all sequences together; 0 for a size.
        limit: in bytes; or a share of what the dense decoder takes.
        is_share: whether `limit` is a share.
    """

    text: str
    kind: ConstraintKind
    tokens: int
    limit: float
    is_share: bool

    def most(self, dense: int) -> float:
        """Return the bytes that are allowed, where the dense decoder takes so many."""
        return self.limit * dense if self.is_share else self.limit


def parse_constraint(text: object) -> Constraint:
    """Read a constraint.

    Raises:
        BudgetError: if the text is no constraint, with examples.
    """
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise _unreadable(text, "it is not of that form")
    kind, unit, number = found["kind"].lower(), found["unit"].lower(), float(found["number"])
    if kind not in ("size", "memory"):
        raise _unreadable(text, f"{found['kind']!r} is neither size nor memory")
    if (kind == "memory") != (found["batch"] is not None):
        raise _unreadable(text, "memory needs a batch and a length, and size has none")
    if unit not in _UNITS and unit != "%":
        raise _unreadable(text, f"{found['unit']!r} is no unit of bytes")
    tokens = int(found["batch"] or 0) * int(found["tokens"] or 0)
    if kind == "memory" and not 1 <= tokens <= _MOST_TOKENS:
        raise _unreadable(text, f"{tokens:,} tokens make no sense")
    limit = number / 100 if unit == "%" else number * _UNITS[unit]
    if not 0.0 < limit < (1.0 if unit == "%" else 2.0**63):
        raise _unreadable(text, f"{found['number']} {found['unit']} makes no sense")
    return Constraint(
        " ".join(text.split()) if isinstance(text, str) else "", kind, tokens, limit, unit == "%"
    )  # type: ignore[arg-type]


def in_bytes(number: float) -> str:
    """Return a number of bytes in the largest unit that it has at least one of, to four digits."""
    for unit, size in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.0f} B"


def _unreadable(text: object, reason: str) -> BudgetError:
    return BudgetError(
        f"{option('constraint')} cannot be read: {reason}",
        where=repr(text)[:80],
        hint="write it as in " + ", ".join(f'"{example}"' for example in EXAMPLES),
    )
