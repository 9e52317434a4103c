"""Latency of products on a device, so that pruning does not make a branch slower.

A smaller product is not always faster: a GPU computes in tiles, and selecting and placing features takes
extra time.  A `LatencyTable` holds seconds; `slower_branches` compares every cut branch with the dense
one. The table is part of the budget and of the plan, so the same logits and table always give the same
selections.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dispfx.errors import DataError
from dispfx.files.json_text import read_json
from dispfx.ir.sites import UNTOUCHED, Site


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step of one decoder, whole: dense, and pruned to several sizes.

    Args:
        batch: sequences.
        tokens: new tokens of each; 1 for a decode step.
        past: cached tokens of each.
        mode: eager or compiled.
        dense_parameters, dense_seconds: of the dense decoder, which selects nothing.
        parameters: of the pruned decoders, rising.
        seconds: of each, never falling.
        cache_seconds: that removing all of the KV cache would save, beyond what its weights do.
    """

    batch: int
    tokens: int
    past: int
    mode: str
    dense_parameters: int
    dense_seconds: float
    parameters: tuple[int, ...]
    seconds: tuple[float, ...]
    cache_seconds: float = 0.0

    @property
    def text(self) -> str:
        """The step as a constraint names it."""
        if self.tokens == 1:
            return f"decode {self.batch}@{self.past}"
        return f"prefill {self.batch}x{self.tokens}"

    @staticmethod
    def of_plain(plain: Any) -> "StepTimes":
        """Return the times from plain JSON data; KeyError, TypeError or ValueError if it is not that."""
        times = StepTimes(
            int(plain["batch"]),
            int(plain["tokens"]),
            int(plain["past"]),
            str(plain["mode"]),
            int(plain["dense_parameters"]),
            float(plain["dense_seconds"]),
            tuple(map(int, plain["parameters"])),
            tuple(map(float, plain["seconds"])),
            float(plain["cache_seconds"]),
        )
        numbers = np.array([*times.seconds, *times.parameters, times.dense_seconds, times.dense_parameters])
        if not np.isfinite(numbers).all() or (numbers <= 0).any() or not 0 <= times.cache_seconds < np.inf:
            raise ValueError("times and sizes of a step must be positive")
        sizes, seconds = list(times.parameters), list(times.seconds)
        if not len(sizes) == len(seconds) >= 2 or sizes != sorted(set(sizes)) or seconds != sorted(seconds):
            raise ValueError("a step needs two or more times, which rise with the parameters")
        if min(times.batch, times.tokens) < 1 or times.past < 0:
            raise ValueError("a step needs sequences and tokens")
        return times


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of a product of activations with a weight (rows, columns), at one number of tokens.

    Args:
        device: name of the GPU or CPU.
        dtype: such as bfloat16.
        tokens: rows of the activations, batch × new tokens.
        rows, columns: measured sizes, increasing.
        seconds: for every number of rows, one value per number of columns.
        selection_seconds: of selecting the reads of a branch and placing its writes.
        steps: of one decoder, for constraints of time.
    """

    device: str
    dtype: str
    tokens: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    selection_seconds: float = 0.0
    steps: tuple[StepTimes, ...] = ()

    def product_seconds(self, rows: Any, columns: Any) -> Any:
        """Return the time of a product: linear between measured sizes, proportional outside.

        Sizes that are tensors give a time with gradients.
        """
        by_column = [_at(self.rows, values, rows) for values in zip(*self.seconds, strict=True)]
        return _at(self.columns, by_column, columns)

    @staticmethod
    def of_plain(plain: Any) -> "LatencyTable":
        """Return the table from plain JSON data.

        Raises:
            DataError: if it is not a latency table.
        """
        try:
            table = LatencyTable(
                str(plain["device"]),
                str(plain["dtype"]),
                int(plain["tokens"]),
                tuple(map(int, plain["rows"])),
                tuple(map(int, plain["columns"])),
                tuple(tuple(map(float, row)) for row in plain["seconds"]),
                float(plain["selection_seconds"]),
                tuple(map(StepTimes.of_plain, plain.get("steps", ()))),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"this is not a latency table: {error}", hint=_HINT) from error
        table.check()
        return table

    def check(self) -> None:
        """Raise unless sizes increase and every time is positive.

        Raises:
            DataError: with the reason.
        """
        for name, sizes in (("rows", self.rows), ("columns", self.columns)):
            if len(sizes) < 1 or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise DataError(f"the {name} of a latency table must increase from 1 or more", hint=_HINT)
        if [len(row) for row in self.seconds] != [len(self.columns)] * len(self.rows):
            raise DataError("a latency table has one time for every pair of sizes", hint=_HINT)
        times = np.array([self.selection_seconds, *np.array(self.seconds).flatten()])
        if not np.isfinite(times).all() or (times[1:] <= 0).any() or times[0] < 0:
            raise DataError("the times of a latency table must be positive numbers", hint=_HINT)


def read_costs(path: str | Path) -> LatencyTable:
    """Read a table from a JSON file.

    Raises:
        DataError: if the file is missing, or not a latency table.
    """
    try:
        plain = read_json(Path(path).expanduser())
    except (OSError, ValueError) as error:
        raise DataError(f"a latency table was expected: {error}", where=str(path), hint=_HINT) from error
    return LatencyTable.of_plain(plain)


def latency_table(costs: LatencyTable | str | Path | None) -> LatencyTable | None:
    """Return a table, reading it if a path is given; None stays None.

    Raises:
        DataError: as `read_costs`.
    """
    return costs if costs is None or isinstance(costs, LatencyTable) else read_costs(costs)


_HINT = "make one with `dispfx costs` on the device that the result is for"


def _at(sizes: Sequence[int], values: Sequence[Any], size: Any) -> Any:
    """Interpolate or extrapolate the value at a size."""
    if size <= sizes[0] or len(sizes) == 1:
        # Small products are dominated by launch time, so nothing is gained below the smallest size.
        return values[0] if size <= sizes[0] else values[0] * size / sizes[0]
    if size >= sizes[-1]:
        return values[-1] * size / sizes[-1]
    upper = bisect_right(sizes, size)
    share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    return values[upper - 1] + share * (values[upper] - values[upper - 1])


@dataclass(frozen=True)
class BranchCost:
    """Seconds of one branch's products, dense and cut."""

    name: str
    dense_seconds: float
    pruned_seconds: float

    @property
    def is_slower(self) -> bool:
        """Whether the branch is slower when cut."""
        return self.pruned_seconds > self.dense_seconds


def branch_costs(
    table: LatencyTable,
    sites: Sequence[Site],
    shapes: Mapping[str, tuple[int, ...]],
    masks: Sequence[Tensor],
) -> list[BranchCost]:
    """Return the cost of every branch, in the order of the sites.

    Args:
        sites: of the decoder.
        shapes: of at least the parameters that they cut; two-dimensional ones are products.
        masks: (N,) per site, whether a feature is kept.
    """
    found = []
    for branch in dict.fromkeys(site.branch for site in sites):
        own = [(site, mask) for site, mask in zip(sites, masks, strict=True) if site.branch == branch]
        stays = _positions(own)
        paths = sorted({path for path, _ in stays if len(shapes[path]) == 2})
        dense = sum(table.product_seconds(*shapes[path]) for path in paths)
        pruned = sum(table.product_seconds(*_kept_shape(path, shapes[path], stays)) for path in paths)
        selects = any(site.is_gathered and not bool(mask.all()) for site, mask in own)
        found.append(BranchCost(branch, dense, pruned + (table.selection_seconds if selects else 0.0)))
    return found


def _positions(own: Sequence[tuple[Site, Tensor]]) -> dict[tuple[str, int], np.ndarray]:
    """Return the kept positions of every axis that the sites cut."""
    stays: dict[tuple[str, int], np.ndarray] = {}
    for site, mask in own:
        kept = mask.cpu().numpy().astype(bool)
        for cut in site.slices:
            if cut.by_expert:
                continue  # a stack is not a single product
            labels = np.arange(site.size) if cut.labels is None else np.array(cut.labels)
            stay = (labels == UNTOUCHED) | kept[np.maximum(labels, 0)]
            key = (cut.parameter, cut.axis)
            stays[key] = stays[key] & stay if key in stays else stay
    return stays


def _kept_shape(
    path: str, shape: tuple[int, ...], stays: Mapping[tuple[str, int], np.ndarray]
) -> tuple[int, int]:
    rows, columns = (
        int(stays[path, axis].sum()) if (path, axis) in stays else size for axis, size in enumerate(shape)
    )
    return max(1, rows), max(1, columns)
