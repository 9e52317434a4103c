"""The budget of a plan: the ratio to remove, and the counted parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any, get_args

from dispfx.errors import BudgetError
from dispfx.plan.latency_table import LatencyTable, latency_table
from dispfx.settings.field import field_of
from dispfx.settings.sections import UNALIGNED, BudgetSettings, RatioOf
from dispfx.words.choices import require_choice
from dispfx.words.constraint_text import parse_constraint
from dispfx.words.own_function import identity_of, is_identity, names_function, shown

_ROUNDING = 1e-9
# How far from the ratio that was asked for a result may be.
_ROUNDED = 0.005

# What a ratio counts: parameters, or a cost of the user, as a function or as text that names one.
Counted = RatioOf | str | Callable[[Any], Any]


@dataclass(frozen=True)
class Budget:
    """The budget of a plan.

    Args:
        ratio: share of the counted parameters to remove, in [0, 1).
        of: `blocks` counts parameters that some site cuts, `total` all of them, and a user's function
            what it returns (`dispfx.plan.own_cost`).  A file holds only the function's name and digest.
        align: widths become multiples of this, or the full width.
        costs: latency table of the target device; branches that would be slower when cut stay dense.
        kv_ratio: share of the KV cache to remove, in (0, 1), by itself; None leaves it to the ratio.
        constraints: what the result must fit into (`dispfx.words.constraint_text`).
        floor: with constraints, the ratio that was asked for, or 0; `ratio` is then the one that they need.
    """

    ratio: float
    of: Counted = BudgetSettings.ratio_of
    align: int = UNALIGNED
    costs: LatencyTable | None = None
    kv_ratio: float | None = None
    constraints: tuple[str, ...] = ()
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            DispfxError: if `of` is neither.
            BudgetError: if `ratio`, `align` or `kv_ratio` makes no sense.
        """
        if not (names_function(self.of) or is_identity(self.of)):
            require_choice(get_args(RatioOf), self.of, "of")
        require_ratio(self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))
        share = field_of(BudgetSettings, "kv_ratio")
        object.__setattr__(self, "kv_ratio", share.plain(self.kv_ratio))
        share.require(self.kv_ratio)
        object.__setattr__(self, "constraints", tuple(parse_constraint(one).text for one in self.constraints))
        require_ratio(self.floor)
        if self.align < 1:
            raise BudgetError(f"widths are multiples of at least 1, but {self.align} was given")

    @staticmethod
    def of_settings(asked: BudgetSettings, align: int) -> "Budget":
        """Return the budget of a run; for a range of ratios, that of the largest.

        Args:
            align: of widths, unless the settings have one.

        Raises:
            DataError: if the latency table cannot be read.
        """
        return Budget(
            ratio=asked.ratios[1],
            of=asked.ratio_of,
            align=asked.align or align,
            costs=latency_table(asked.costs),
            kv_ratio=asked.kv_ratio,
            constraints=asked.constraint,
            floor=asked.ratios[1] if asked.constraint else 0.0,
        )

    @property
    def recorded(self) -> "Budget":
        """The budget as plans and states hold it: of a user's function, the name and digest."""
        return replace(self, of=identity_of(self.of))

    @property
    def plain(self) -> dict[str, Any]:
        """Every value as plain data, without targets that the budget does not have."""
        values = asdict(self)
        absent = {"kv_ratio": None, "constraints": (), "floor": 0.0}
        return {name: value for name, value in values.items() if name not in absent or value != absent[name]}

    @property
    def costs_of_branches(self) -> LatencyTable | None:
        """The table that leaves branches dense: none if a constraint limits the time of the whole decoder."""
        return None if any(parse_constraint(one).is_time for one in self.constraints) else self.costs

    @property
    def counted(self) -> str:
        """What the ratio counts, for messages."""
        return f"the {self.of} parameters" if self.of in get_args(RatioOf) else shown(self.of)

    def removing(self, achieved: float) -> "Budget":
        """Return the budget of a result: with constraints its ratio is the one that they needed."""
        if not self.constraints:
            return self
        return replace(self, ratio=self.floor if abs(achieved - self.floor) <= _ROUNDED else achieved)

    def cache_left(self, dense: int) -> int:
        """Return how many of so many bytes of the KV cache per token may stay."""
        # 1 - 0.9 is a little less than a tenth.
        return math.floor((1.0 - (self.kv_ratio or 0.0)) * dense * (1.0 + _ROUNDING))

    @property
    def keep(self) -> float:
        """Share of the counted parameters that stays."""
        return 1.0 - self.ratio


def require_range(ratios: object) -> tuple[float, float]:
    """Return the smallest and the largest ratio of a range.

    Raises:
        BudgetError: if they are no two increasing ratios that settings may have.
    """
    if not isinstance(ratios, Sequence) or isinstance(ratios, str) or len(ratios) != 2:
        raise BudgetError(
            f"a range is the smallest and the largest ratio, but {ratios!r} was given",
            hint="as in (0.1, 0.6)",
        )
    low, high = (BudgetSettings(ratio=ratio).ratios[0] for ratio in ratios)
    return BudgetSettings(ratio=f"{low!r}:{high!r}").ratios


def require_ratio(ratio: object) -> None:
    """Raise unless a ratio is 0, which keeps everything, or one that settings may have.

    Raises:
        BudgetError: if it is not; for a percentage, the hint has the share.
    """
    facts = field_of(BudgetSettings, "ratio").facts
    share = float(ratio) if isinstance(ratio, Real) and not isinstance(ratio, bool) else math.nan
    if not (share == 0.0 or facts.allows(share)):
        raise facts.error(
            f"ratio must be a share {facts.range_text()}, but {ratio!r} was given", hint=facts.hint_for(share)
        )
