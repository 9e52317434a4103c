"""A family: one run's plans for every ratio in a range.

Between two knots the logits of a feature are linear in the ratio (`dispfx.plan.knots`), so a family holds the
logits at its knots, and `at` hardens those of a ratio.  A nested family holds one number per feature instead,
the ratio at which the feature goes (`removal_order`): a smaller plan then keeps only what a larger one keeps.

A family file is the plan file of the largest ratio with the logits of every site.  Reading it runs no code.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import BudgetError, PlanMismatchError
from dispfx.ir.program import Program, require_program
from dispfx.plan.budget import Budget, require_ratio
from dispfx.plan.groups import Groups
from dispfx.plan.hardening import ParameterCount, harden, removal_order
from dispfx.plan.knots import Knots, mixed
from dispfx.plan.plan import (
    FAMILY,
    Plan,
    StoredPlan,
    read_plan_file,
    require_same_decoder,
    site_keys,
    write_plan_file,
)
from dispfx.words.given import require_given
from dispfx.words.option_names import option

_LOGITS = "logits of "
# Of knots, far more than a range of ratios has.
_MOST_KNOTS = 64
# Of a ratio that was computed.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Family:
    """The plans of one run for every ratio between its first and its last knot.

    Args:
        plan: that of the largest ratio.
        knots: ratios.
        logits: of every site by name, (K, size) float32 on the CPU; of a nested family (1, size), the ratio
            at which each feature goes.
        constrained: whether all reads and writes share a selection.
    """

    plan: Plan
    knots: Knots
    logits: Mapping[str, Tensor]
    constrained: bool = False

    @staticmethod
    def of(
        program: Program,
        budget: Budget,
        knots: Knots,
        logits_KN: Tensor,
        *,
        seed: int = 0,
        constrained: bool = False,
    ) -> "Family":
        """Return the family of a run.

        Args:
            program: of the decoder.
            budget: what the ratios count, and the alignment; its ratio does not matter.
            knots: of the run.
            logits_KN: of all sites, in order.

        Raises:
            BudgetError: if a ratio cannot be met.
        """
        sites, sizes = program.sites, [site.size for site in program.sites]
        logits_KN = logits_KN.detach().float().cpu()
        if knots.nested:
            groups = Groups.of_run(sites, constrained=constrained)
            count = ParameterCount.of_sites(sites, program.shapes, budget.of)
            budgets = [replace(budget, ratio=ratio) for ratio in knots.ratios]
            order_N = removal_order(groups.of_first(logits_KN), sites, count, budgets, groups=groups)
            logits_KN = groups.expand(order_N)[None].float()
        logits = {
            site.name: of_site.contiguous()
            for site, of_site in zip(sites, logits_KN.split(sizes, 1), strict=True)
        }
        made = _Hardening(sites, program, knots, constrained)
        made.kept(logits_KN, replace(budget, ratio=knots.ratios[0]))
        largest = replace(budget, ratio=knots.ratios[-1])
        plan = Plan.of(program, largest, made.kept(logits_KN, largest), seed)
        return Family(plan, knots, logits, constrained)

    @property
    def range_text(self) -> str:
        """The ratios that it has plans for, for messages."""
        return f"{self.knots.ratios[0]:g} to {self.knots.ratios[-1]:g}"

    def require_ratio(self, ratio: float) -> None:
        """Raise BudgetError unless the family has a plan for a ratio."""
        require_ratio(ratio)
        low, high = self.knots.ratios[0], self.knots.ratios[-1]
        if not low - _ROUNDING <= ratio <= high + _ROUNDING:
            wider = f"{min(low, ratio):g}:{max(high, ratio):g}"
            raise BudgetError(
                f"the family has plans for ratios from {self.range_text}, but {ratio:g} was asked for",
                hint=f"ask for one of these, or learn a family with {option('ratio', wider)}",
            )

    def at(self, program: Program, ratio: float) -> Plan:
        """Return the plan for a ratio.

        Args:
            program: of the decoder that the family was learned on.
            ratio: share of the counted parameters to remove, within the range.

        Raises:
            BudgetError: if the ratio is outside the range, or cannot be met.
            PlanMismatchError: if the family belongs to another decoder, or to other sites of it.
        """
        require_program(program)
        self.require_ratio(ratio)
        require_same_decoder(program, self.plan)
        self.plan.for_sites(program.sites)
        by_keys = {one.keys: self.logits[one.site] for one in self.plan.selections}
        found = [by_keys[site_keys(site)] for site in program.sites]
        for site, logits in zip(program.sites, found, strict=True):
            if logits.shape[1] != site.size:
                raise PlanMismatchError(
                    f"the decoder has a site of {site.size} features, but the family has {logits.shape[1]}",
                    where=site.name,
                    hint="open the decoder in the form that the family was learned on",
                )
        budget = replace(self.plan.budget, ratio=ratio)
        made = _Hardening(program.sites, program, self.knots, self.constrained)
        plan = Plan.of(program, budget, made.kept(torch.cat(found, 1), budget), self.plan.seed)
        return replace(plan, bos=self.plan.bos, made_from=self.plan.made_from, lengths=self.plan.lengths)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """Write the family to `path` atomically.

        Args:
            path: of the file.
            overwrite: as for `Plan.save`.

        Raises:
            OutputError: if the file cannot be written, or exists and is not to be overwritten.
        """
        header = {
            "ratios": list(self.knots.ratios),
            "nested": self.knots.nested,
            "constrained": self.constrained,
        }
        tensors = {f"{_LOGITS}{name}": logits for name, logits in self.logits.items()}
        write_plan_file(self.plan, path, overwrite=overwrite, more=StoredPlan({FAMILY: header}, tensors))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Family":
        """Read a family file.

        Raises:
            DataError: if the file is missing, no family, or contains impossible numbers.
        """
        return read_plan_file(
            path, _family_of, "a family", "pass a file that `learn` wrote for a range of ratios"
        )


def require_family(family: Any) -> None:
    """Raise DispfxError for what is no family."""
    require_given(family, Family, "dispfx.learn_family and Family.load(file) return one")


@dataclass(frozen=True, eq=False)
class _Hardening:
    """From logits at knots to kept features at a ratio."""

    sites: Sequence[Any]
    program: Program
    knots: Knots
    constrained: bool

    def kept(self, logits_KN: Tensor, budget: Budget) -> list[Tensor]:
        """Return the kept indices of every site."""
        groups = Groups.of_run(self.sites, constrained=self.constrained)
        count = ParameterCount.of_sites(self.sites, self.program.shapes, budget.of)
        logits_KN, nested = groups.of_first(logits_KN).double(), self.knots.nested
        if not nested:
            weights_SK = self.knots.weights(torch.tensor([budget.ratio], dtype=torch.float64))
            logits_KN = mixed(logits_KN, weights_SK)
        return harden(logits_KN[0], self.sites, count, budget, groups=groups, in_order=nested)


def _family_of(plan: Plan, stored: StoredPlan) -> Family:
    """Return the family in a file; every number is checked."""
    if FAMILY not in stored.header:
        raise ValueError("it holds one plan")
    header = stored.header[FAMILY]
    ratios = tuple(float(ratio) for ratio in header["ratios"])
    knots = Knots(ratios, bool(header["nested"]))
    if not (2 <= len(ratios) <= _MOST_KNOTS and all(0.0 < ratio < 1.0 for ratio in ratios)):
        raise ValueError(f"its ratios are {ratios}")
    expected = torch.linspace(ratios[0], ratios[-1], len(ratios), dtype=torch.float64)
    if ratios[0] >= ratios[-1] or not torch.allclose(torch.tensor(ratios, dtype=torch.float64), expected):
        raise ValueError(f"its ratios are not evenly spaced: {ratios}")
    rows = 1 if knots.nested else len(ratios)
    names = {f"{_LOGITS}{one.site}": one for one in plan.selections}
    if sorted(names) != sorted(stored.tensors):
        raise ValueError("its logits and its sites have different names")
    for name, one in names.items():
        logits = stored.tensors[name]
        if logits.shape != (rows, one.size) or logits.dtype != torch.float32:
            raise ValueError(
                f"site {one.site}: {tuple(logits.shape)} {logits.dtype} logits for {one.size} features"
            )
        if not bool(logits.isfinite().all()):
            raise ValueError(f"site {one.site}: its logits are not finite")
    logits = {one.site: stored.tensors[name] for name, one in names.items()}
    return Family(plan, knots, logits, bool(header["constrained"]))
