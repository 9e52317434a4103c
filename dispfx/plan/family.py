"""A family: one run's plans for every ratio in a range.

A run for a range learns logits for every ratio (`dispfx.plan.knots`).  What is left of them is one number
per feature: the ratio at which the feature goes (`removal_order`).  The plan for a ratio keeps what goes
later, so a smaller decoder keeps only what a larger one keeps.

A family file is the plan file of the largest ratio with these numbers for every site.  Reading it runs no
code.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispfx.errors import BudgetError, PlanMismatchError
from dispfx.ir.program import Program, require_program
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget, require_ratio
from dispfx.plan.groups import Groups
from dispfx.plan.hardening import ParameterCount, harden, removal_order
from dispfx.plan.knots import Knots
from dispfx.plan.plan import (
    FAMILY,
    Plan,
    StoredPlan,
    is_family_file,
    read_plan_file,
    require_same_decoder,
    site_keys,
    write_plan_file,
)
from dispfx.words.option_names import option

_ORDER = "order of "
# Of a ratio that was computed.
_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Family:
    """The plans of one run for every ratio of a range.

    Args:
        plan: that of the largest ratio.
        smallest: the smallest ratio.
        order: for every site by name, the ratio at which each feature goes, (size,) float32 on the CPU; what
            stays at the largest ratio has larger numbers, and what goes before the smallest has smaller ones.
        constrained: whether all reads and writes share a selection.
    """

    plan: Plan
    smallest: float
    order: Mapping[str, Tensor]
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
        sites = program.sites
        groups = Groups.of_run(sites, constrained=constrained)
        count = ParameterCount.of_sites(sites, program.shapes, budget.of)
        budgets = [replace(budget, ratio=ratio) for ratio in knots.ratios]
        logits_KN = groups.of_first(logits_KN.detach())
        order_N = removal_order(logits_KN, sites, count, budgets, groups=groups).float()
        parts = groups.expand(order_N).split([site.size for site in sites])
        order = {site.name: part.contiguous() for site, part in zip(sites, parts, strict=True)}
        kept = harden(order_N, sites, count, budgets[-1], groups=groups, in_order=True)
        plan = Plan.of(program, budgets[-1], kept, seed)
        return Family(plan, knots.ratios[0], order, constrained)

    @property
    def largest(self) -> float:
        """The largest ratio."""
        return self.plan.budget.ratio

    @property
    def range_text(self) -> str:
        """The ratios that it has plans for, for messages."""
        return f"{self.smallest:g} to {self.largest:g}"

    def require_ratio(self, ratio: float) -> None:
        """Raise BudgetError unless the family has a plan for a ratio."""
        require_ratio(ratio)
        if not self.smallest - _ROUNDING <= ratio <= self.largest + _ROUNDING:
            wider = f"{min(self.smallest, ratio):g}:{max(self.largest, ratio):g}"
            raise BudgetError(
                f"the family has plans for ratios from {self.range_text}, but {ratio:g} was asked for",
                hint=f"ask for one of these, or learn a family with {option('ratio', wider)}",
            )

    def at(self, program: Program, ratio: float) -> Plan:
        """Return the plan for a ratio, which it meets up to half a step of one width.

        Args:
            program: of the decoder that the family was learned on.
            ratio: share of the counted parameters to remove, within the range.

        Raises:
            BudgetError: if the ratio is outside the range.
            PlanMismatchError: if the family belongs to another decoder, or to other sites of it.
        """
        require_program(program)
        self.require_ratio(ratio)
        require_same_decoder(program, self.plan)
        sites, budget = program.sites, replace(self.plan.budget, ratio=ratio)
        groups = Groups.of_run(sites, constrained=self.constrained)
        count = ParameterCount.of_sites(sites, program.shapes, budget.of)
        order_N = groups.of_first(torch.cat(self._fitting(sites)))
        plan = Plan.of(
            program,
            budget,
            harden(order_N, sites, count, budget, groups=groups, in_order=True),
            self.plan.seed,
        )
        return replace(plan, bos=self.plan.bos, made_from=self.plan.made_from, lengths=self.plan.lengths)

    def _fitting(self, sites: Sequence[Site]) -> list[Tensor]:
        """Return the order of every site, matched by the parameter axes that they cut."""
        self.plan.for_sites(sites)
        by_keys = {one.keys: self.order[one.site] for one in self.plan.selections}
        found = [by_keys[site_keys(site)] for site in sites]
        for site, order in zip(sites, found, strict=True):
            if len(order) != site.size:
                raise PlanMismatchError(
                    f"the decoder has a site of {site.size} features, but the family has {len(order)}",
                    where=site.name,
                    hint="open the decoder in the form that the family was learned on",
                )
        return found

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """Write the family to `path` atomically.

        Args:
            path: of the file.
            overwrite: as for `Plan.save`.

        Raises:
            OutputError: if the file cannot be written, or exists and is not to be overwritten.
        """
        header = {"smallest": self.smallest, "constrained": self.constrained}
        tensors = {f"{_ORDER}{name}": order for name, order in self.order.items()}
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


def stored_plans(path: str | os.PathLike[str]) -> Plan | Family:
    """Read a plan file or a family file.

    Raises:
        DataError: as `Plan.load` or `Family.load`.
    """
    return Family.load(path) if is_family_file(path) else Plan.load(path)


def _family_of(plan: Plan, stored: StoredPlan) -> Family:
    """Return the family in a file; every number is checked."""
    if FAMILY not in stored.header:
        raise ValueError("it holds one plan")
    header = stored.header[FAMILY]
    smallest, constrained = float(header["smallest"]), header["constrained"]
    if not 0.0 < smallest < plan.budget.ratio:
        raise ValueError(f"its ratios are {smallest} to {plan.budget.ratio}")
    if not isinstance(constrained, bool):
        raise ValueError(f"constrained is {constrained!r}")
    names = {f"{_ORDER}{one.site}": one for one in plan.selections}
    if sorted(names) != sorted(stored.tensors):
        raise ValueError("its order and its sites have different names")
    order = {}
    for name, one in names.items():
        found = order[one.site] = stored.tensors[name]
        if found.shape != (one.size,) or found.dtype != torch.float32:
            raise ValueError(
                f"site {one.site}: {tuple(found.shape)} {found.dtype} numbers for {one.size} features"
            )
        if not bool(found.isfinite().all()):
            raise ValueError(f"site {one.site}: the order of its features is not finite")
    return Family(plan, smallest, order, constrained)
