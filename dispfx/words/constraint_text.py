"""What a decoder must fit into, as a user writes it.

    size: 6 GB                 the weights of the folder
    size: 60%                  … as a share of the dense decoder's
    memory 8x4096: 12 GB       weights, and the KV cache of 8 sequences of 4096 tokens
    decode 1@1024: 1.5x        a decode step of 1 sequence after 1024 tokens, that much faster than dense
    prefill 1x2048: 80 ms      reading 1 sequence of 2048 tokens

A name, for all but the size a batch and a length, a colon, and a number with its unit.  Units are B, kB, MB,
GB and TB (powers of 1000), KiB, MiB, GiB and TiB (powers of 1024) and %; for times us, ms, s and x.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from dispfx.errors import BudgetError, DataError
from dispfx.words.option_names import option

ConstraintKind = Literal["size", "memory", "decode", "prefill"]
EXAMPLES = ("size: 6 GB", "size: 60%", "memory 8x4096: 12 GB", "decode 1@1024: 1.5x", "prefill 1x2048: 80 ms")
TIMED = ("decode", "prefill")

_FORM = re.compile(
    r"(?P<kind>[a-z]+)(?: *(?P<batch>\d+) *(?P<sign>[x@]) *(?P<length>\d+))? *: *"
    r"(?P<number>\d+(?:\.\d+)?) *(?P<unit>[a-z]+|%)",
    re.IGNORECASE | re.ASCII,
)
_SIGNS = {"size": None, "memory": "x", "decode": "@", "prefill": "x"}
_BYTES = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024))
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST = 2**20
_MOST = 2.0**63


@dataclass(frozen=True)
class Constraint:
    """An upper limit.

    Args:
        text: as it was written, with single spaces.
        kind: what is limited.
        batch, length: of the sequences; 0 for a size.
        limit: in bytes or seconds, or a share of what the dense decoder takes.
        is_share: whether `limit` is a share.
    """

    text: str
    kind: ConstraintKind
    batch: int
    length: int
    limit: float
    is_share: bool

    @property
    def is_time(self) -> bool:
        """Whether a time is limited, and not bytes."""
        return self.kind in TIMED

    def most(self, dense: float) -> float:
        """Return what is allowed, where the dense decoder takes so much."""
        return self.limit * dense if self.is_share else self.limit


def parse_constraint(text: object) -> Constraint:
    """Read a constraint.

    Raises:
        BudgetError: if the text is no constraint, with examples.
    """
    found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or not isinstance(text, str):
        raise _unreadable(text, "it is not of that form")
    kind, unit, number = found["kind"].lower(), found["unit"].lower(), float(found["number"])
    if kind not in _SIGNS:
        raise _unreadable(text, f"{found['kind']!r} is not one of {', '.join(get_args(ConstraintKind))}")
    if (found["sign"] or "").lower() != (_SIGNS[kind] or ""):
        raise _unreadable(text, f"{kind} is written in another way")
    batch, length = int(found["batch"] or 0), int(found["length"] or 0)
    if kind != "size" and not (1 <= batch <= _LONGEST and 1 <= length <= _LONGEST):
        raise _unreadable(text, f"a batch and a length are 1 to {_LONGEST:,}")
    limit, is_share = _limit(text, kind, number, unit)
    return Constraint(" ".join(text.split()), cast(ConstraintKind, kind), batch, length, limit, is_share)


def parse_step(text: object) -> tuple[int, int, int]:
    """Return the batch, the new and the cached tokens of a step such as `decode 1@1024`.

    Raises:
        DataError: if the text is no step.
    """
    try:
        found = parse_constraint(f"{text}: 1 s" if isinstance(text, str) else text)
    except BudgetError:
        found = None
    if found is None or not found.is_time:
        raise DataError(
            f"{option('step')} cannot be read",
            where=repr(text)[:80],
            hint='write it as in "decode 1@1024" or "prefill 1x2048"',
        )
    decodes = found.kind == "decode"
    return found.batch, 1 if decodes else found.length, found.length if decodes else 0


def _limit(text: str, kind: str, number: float, unit: str) -> tuple[float, bool]:
    """Return a limit, and whether it is a share of what the dense decoder takes."""
    units, relative = (_SECONDS, "x") if kind in TIMED else (_BYTES, "%")
    if unit != relative and unit not in units:
        raise _unreadable(text, f"{unit!r} is no unit of {'a time' if kind in TIMED else 'bytes'}")
    if unit == "x":
        limit, most = 1.0 / number if number else 0.0, 1.0
    elif unit == "%":
        limit, most = number / 100, 1.0
    else:
        limit, most = number * units[unit], _MOST
    if not 0.0 < limit < most:
        raise _unreadable(text, f"{number:g} {unit} makes no sense")
    return limit, unit == relative


def in_bytes(number: float) -> str:
    """Return a number of bytes in the largest unit that it has at least one of, to four digits."""
    for unit, size in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.0f} B"


def in_unit(text: str, number: float) -> str:
    """Return what a constraint limits with its unit: bytes, or a time."""
    if not parse_constraint(text).is_time:
        return in_bytes(number)
    return f"{number:.4g} s" if number >= 1.0 else f"{number * 1e3:.4g} ms"


def _unreadable(text: object, reason: str) -> BudgetError:
    return BudgetError(
        f"{option('constraint')} cannot be read: {reason}",
        where=repr(text)[:80],
        hint="write it as in " + ", ".join(f'"{example}"' for example in EXAMPLES),
    )
