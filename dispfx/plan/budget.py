"""The budget of a plan: the ratio to remove, and the counted parameters."""

from dataclasses import dataclass

from dispfx.plan.latency_table import CostTable
from dispfx.settings.sections import RatioOf
from dispfx.words.choices import check_choices


@dataclass(frozen=True)
class Budget:
    """The budget of a plan.

    Args:
        ratio: share of the counted parameters to remove, in [0, 1).
        of: `blocks` counts parameters that some site cuts; `total` counts all of them.
        align: widths become multiples of this, or the full width.
        costs: latency table of the target device; branches that would be slower when cut stay dense.
    """

    ratio: float
    of: RatioOf = "blocks"
    align: int = 1
    costs: CostTable | None = None

    def __post_init__(self) -> None:
        """Check `of`.

        Raises:
            DispfxError: if `of` is neither.
        """
        check_choices(self)

    @property
    def keep(self) -> float:
        """Share of the counted parameters that stays."""
        return 1.0 - self.ratio
