"""A user's cost of a pruned decoder, in place of the parameters that a ratio counts.

    cost(shapes) -> number, or numbers by name          `--ratio-of mine.py:cost`

`shapes` maps the path of every parameter to its shape after pruning.  The sizes of axes that a site cuts are
float64 scalars with gradients; all other sizes are whole numbers.  Of a stack of experts with their own
features, the cut size is the mean over the experts.

1. One number: the ratio is the share of it to remove.
2. Numbers by name: every one of them meets the ratio alone, for example one per layer.  No two of them
   depend on one selection.
3. Features that no number depends on are kept.

Legend: S samples of the masks, X distinct axis sizes, P numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import BudgetError
from dispfx.ir.sites import Site
from dispfx.words.own_function import OwnFunction

# Sizes are tried between all features and this share of them, at so many places.
_LEAST_SHARE, _TRIED = 0.5, 16
# Share of a change that gradients need not explain.
_MOST_IN_STEPS = 0.5


@dataclass(frozen=True, eq=False)
class OwnCost:
    """A user's cost, as shares of what it is with everything kept.

    Args:
        function: of the user.
        shapes: of every parameter by path.
        columns: for every cut (parameter, axis), its column among the axis sizes, and the number of experts
            that this size is summed over.
        dense: the numbers with everything kept, by name.
    """

    function: OwnFunction
    shapes: Mapping[str, tuple[int, ...]]
    columns: Mapping[tuple[str, int], tuple[int, int]]
    dense: Mapping[str, float]

    @staticmethod
    def of_sites(
        function: OwnFunction,
        sites: Sequence[Site],
        shapes: Mapping[str, tuple[int, ...]],
        column_of: Mapping[tuple[str, int], int],
    ) -> "OwnCost":
        """Return the cost of a decoder.

        Args:
            column_of: for every cut (parameter, axis), its column among the axis sizes.

        Raises:
            BudgetError: if the function does not return positive numbers with a gradient, or they change in
                steps.
            SourceError: if it raises an error.
        """
        stacked = {(cut.parameter, cut.axis) for site in sites for cut in site.slices if cut.by_expert}
        columns = {
            place: (column, shapes[place[0]][0] if place in stacked else 1)
            for place, column in column_of.items()
        }
        found = OwnCost(function, shapes, columns, {})
        whole_X = torch.zeros(1 + max(column_of.values()), dtype=torch.float64)
        for (path, axis), (column, experts) in columns.items():
            whole_X[column] = shapes[path][axis] * experts
        with torch.enable_grad():  # callers often measure with gradients off
            dense, again = (found._numbers(whole_X.requires_grad_()) for _ in range(2))
        values = {name: float(number.detach()) for name, number in dense.items()}
        for name, value in values.items():
            if not dense[name].requires_grad or not 0.0 < value < math.inf:
                raise BudgetError(
                    f"{function.name} must return positive numbers that depend on the sizes of the weights, "
                    f"and returned {value:g}{f' for {name}' if name else ''}",
                    hint="compute with the sizes as tensors: float() and int() lose their gradients",
                )
        if values != {name: float(number.detach()) for name, number in again.items()}:
            raise BudgetError(
                f"{function.name} must return the same numbers whenever it is given the same shapes, "
                "and the second time it did not",
                hint="keep no state between calls, and draw no random numbers",
            )
        for name in values:
            found._require_slope(name, whole_X.detach())
        return replace(found, dense=values)

    def _require_slope(self, name: str, whole_X: Tensor) -> None:
        """Raise if a number falls in steps: learning follows its gradient, which is zero between steps."""
        ends = [float(self._numbers(whole_X * share)[name].detach()) for share in (1.0, _LEAST_SHARE)]
        step = (1.0 - _LEAST_SHARE) / _TRIED
        followed = 0.0
        with torch.enable_grad():
            for index in range(_TRIED):
                sizes_X = (whole_X * (1.0 - (index + 0.5) * step)).requires_grad_()
                number = self._numbers(sizes_X)[name]
                if number.requires_grad:
                    (slope_X,) = torch.autograd.grad(number, sizes_X, materialize_grads=True)
                    followed += float(slope_X @ whole_X) * step
        change = ends[0] - ends[1]
        if abs(change - followed) > _MOST_IN_STEPS * abs(change):
            of_name = f" for {name}" if name else ""
            raise BudgetError(
                f"{self.function.name} changes in steps: it falls by {change:g}{of_name} when all sizes are "
                f"halved, and its gradients say {followed:g}",
                hint="learning needs a slope: leave out floor, ceil, round and comparisons of sizes",
            )

    def only(self, name: str) -> "OwnCost":
        """Return the cost with one of its numbers alone."""
        return replace(self, dense={name: self.dense[name]})

    def shares(self, sizes_SX: Tensor) -> Tensor:
        """Return what remains of every number, (S, P) in [0, 1], differentiable in the sizes.

        The function runs on the CPU, where operations on scalars are faster.
        """
        rows = [self._numbers(sizes_X) for sizes_X in sizes_SX.cpu()]
        shares = [[numbers[name] / dense for name, dense in self.dense.items()] for numbers in rows]
        return torch.stack([torch.stack(row) for row in shares]).to(sizes_SX.device)

    def _numbers(self, sizes_X: Tensor) -> dict[str, Tensor]:
        given: dict[str, tuple[Any, ...]] = {
            path: tuple(
                sizes_X[place[0]] / place[1] if (place := self.columns.get((path, axis))) else size
                for axis, size in enumerate(shape)
            )
            for path, shape in self.shapes.items()
        }
        found = self.function(given)
        named = found if isinstance(found, Mapping) else {"": found}
        try:
            numbers = {str(name): torch.as_tensor(one).double().reshape(()) for name, one in named.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise BudgetError(
                f"{self.function.name} must return a number, or a dict of numbers: {error}"
            ) from error
        if not numbers:
            raise BudgetError(f"{self.function.name} returned no number")
        return numbers
